"""A pytest that is started by hand runs marked tests in MPI jobs, and reports them as its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support import jobs
from support.processes import none_left, with_variable

OUTCOMES = """
    def test_plain():
        assert comm.size == 1

    @two_ranks
    def test_passes():
        assert comm.allreduce(1) == 2

    @two_ranks
    def test_fails_on_one():
        print("printed by", comm.rank)
        comm.barrier()
        assert comm.rank == 0, "only here"

    @two_ranks
    def test_fails_on_both():
        assert comm.size == 3

    @two_ranks
    @pytest.mark.xfail
    def test_expected_to_fail():
        assert comm.rank == 5

    @two_ranks
    @pytest.mark.xfail
    def test_expected_to_fail_on_one():
        assert comm.rank == 0

    @two_ranks
    @pytest.mark.xfail(strict=True)
    def test_sure_to_fail_on_one():
        assert comm.rank == 0

    @two_ranks
    @pytest.mark.skip(reason="not today")
    def test_skipped():
        pass

    @two_ranks
    def test_skipped_on_one():
        if comm.rank:
            pytest.skip("not here")

    @pytest.fixture
    def fails_on_one():
        if comm.rank:
            raise RuntimeError("no fixture")

    @two_ranks
    def test_no_fixture_on_one(fails_on_one):
        comm.recv(source=1)

    @pytest.mark.mpi(ranks=2)
    class TestInClass:
        @pytest.mark.parametrize("value", ["a b", "c::d", "[é]/x"])
        def test_parameter(self, value):
            assert comm.allreduce(len(value)) > 0
"""


def test_every_outcome(write, run_pytest):
    write(OUTCOMES)
    ended = run_pytest("-rfs", "--durations=3", "-vv", "--durations-min=0")
    assert ended.counts == {"passed": 6, "failed": 2, "skipped": 1, "xfailed": 3, "error": 1}
    assert ended.code == pytest.ExitCode.TESTS_FAILED

    one = ended.failure("test_fails_on_one")
    assert re.match(r"-+ rank 1 of 2 on \S+ -+\n", one)
    assert "assert comm.rank == 0" in one and "rank 0 of 2" not in one
    assert re.search(r"Captured stdout call \(rank 0\) -+\nprinted by 0\n", one)
    assert re.search(r"Captured stdout call \(rank 1\) -+\nprinted by 1\n", one)
    both = ended.failure("test_fails_on_both")
    assert re.match(r"-+ all 2 ranks -+\n", both)
    assert both.count("assert 2 == 3") == 1
    assert re.search(
        r"FAILED test_it.py::test_fails_on_one - rank 1 of 2 on \S+: .*only here", ended.output
    )
    assert "no fixture" in ended.failure("test_no_fixture_on_one")
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: not today", ended.output)
    assert re.search(r"[\d.]+s call +test_it.py::", ended.output)
    assert "test_it.py::TestInClass::test_parameter[c::d] PASSED" in ended.output


SUBTESTS = """
    import unittest

    @two_ranks
    def test_all_pass(subtests):
        for number in range(comm.rank + 1):
            with subtests.test(number=number):
                assert number < 2

    @two_ranks
    def test_one_fails(subtests):
        for number in range(3):
            with subtests.test("sub", number=number):
                assert number != comm.rank + 1
        comm.barrier()

    @two_ranks
    def test_one_fails_on_one(subtests):
        with subtests.test(rank=comm.rank):
            assert comm.rank == 0

    class TestUnit(unittest.TestCase):
        @two_ranks
        def test_one_fails(self):
            with self.subTest(rank=comm.rank):
                self.assertEqual(comm.rank, 1)
"""


def test_a_failed_subtest_fails_its_test(write, run_pytest):
    write(SUBTESTS)
    ended = run_pytest()
    assert ended.counts == {"passed": 1, "failed": 3}
    both = ended.failure("test_one_fails")
    assert "test_one_fails [sub] (number=1)" in both and "test_one_fails [sub] (number=2)" in both
    assert "(rank=1)" in ended.failure("test_one_fails_on_one")


def test_an_exit_on_one_rank_ends_the_session(write, run_pytest):
    write("""
        @two_ranks
        def test_leaves():
            if comm.rank == 1:
                pytest.exit("enough", 5)
            comm.barrier()

        @two_ranks
        def test_after():
            pass
    """)
    ended = run_pytest()
    assert ended.code == 5
    assert "Exit: enough" in ended.output and "passed" not in ended.output


def test_a_rank_that_fails_or_dies_while_others_wait(write, run_pytest):
    write("""
        @two_ranks
        def test_others_wait():
            assert comm.rank == 0, "gone"
            comm.recv(source=1)

        @two_ranks
        def test_killed():
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.recv(source=1)

        @two_ranks
        def test_left():
            if comm.rank == 0:
                os._exit(0)
            comm.barrier()

        @two_ranks
        def test_after():
            assert comm.allreduce(1) == 2
    """)
    ended = run_pytest()
    assert ended.counts == {"failed": 3, "passed": 1}
    assert "AssertionError: gone" in ended.failure("test_others_wait")
    assert "Other ranks were still in the test" in ended.failure("test_others_wait")
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL", ended.failure("test_killed"))
    assert re.search(r"rank 0 on \S+ left", ended.failure("test_left"))


def test_a_hang_fails_with_every_stack_and_leaves_nothing(write, run_pytest, tmp_path):
    write("""
        @pytest.mark.mpi(ranks=2, timeout=15)
        def test_hangs():
            if comm.rank == 1:
                time.sleep(1000)  # where rank 1 is
            comm.recv(source=1)  # where rank 0 is
    """)
    lines = (tmp_path / "test_it.py").read_text().splitlines()
    ended = run_pytest(PLUGIN_TEST=str(tmp_path))
    assert ended.counts == {"failed": 1}
    shown = ended.failure("test_hangs")
    assert shown.startswith("The job did not end within 15 s.\n")
    for rank in range(2):
        stack = shown.partition(f"Stacks of rank {rank} of 2")[2].partition("Stacks of")[0]
        line = int(re.search(r'test_it.py", line (\d+) in test_hangs', stack)[1])
        assert lines[line - 1].endswith(f"# where rank {rank} is")
    assert none_left("PLUGIN_TEST", str(tmp_path))


def test_ranks_do_not_outlive_the_pytest_that_started_them(write, tmp_path):
    write("""
        @two_ranks
        def test_long():
            open(f"started-{comm.rank}", "w").close()
            time.sleep(1000)
    """)
    command = [sys.executable, "-m", "pytest", "-p", "multimesh.pytest_plugin"]
    environ = jobs.clean_environment() | {"PLUGIN_TEST": str(tmp_path)}
    outer = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"started-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and outer.poll() is None
        time.sleep(0.1)
    assert len(with_variable("PLUGIN_TEST", str(tmp_path))) > 2
    outer.send_signal(signal.SIGKILL)
    outer.wait()
    assert none_left("PLUGIN_TEST", str(tmp_path), seconds=20)


def test_several_numbers_of_ranks_and_variables(write, run_pytest):
    write("""
        pytestmark = pytest.mark.mpi(ranks=(1, 2))

        def test_both():
            assert comm.size in (1, 2)

        @pytest.mark.mpi(ranks=3)
        def test_inner_mark():
            assert comm.size == 3

        @pytest.mark.mpi(ranks=1, env={"COLOUR": "red"})
        def test_variable():
            assert os.environ["COLOUR"] == "red"
    """)
    ended = run_pytest("-v")
    assert ended.counts == {"passed": 4}
    names = re.findall(r"test_it.py::(.*) PASSED", ended.output)
    assert names == ["test_both[1 rank]", "test_both[2 ranks]", "test_inner_mark", "test_variable"]


def test_selection_stops_and_results(write, run_pytest, tmp_path):
    write("""
        @pytest.mark.mpi(ranks=1)
        def test_first():
            pass

        @pytest.mark.mpi(ranks=1)
        def test_second():
            assert not os.environ.get("FAIL")

        @pytest.mark.mpi(ranks=1)
        def test_third():
            pass
    """)
    ended = run_pytest("-x", "--junitxml=results.xml", FAIL="1")
    assert ended.counts == {"passed": 1, "failed": 1}
    assert (tmp_path / "results.xml").read_text().count("<testcase") == 2
    failed = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert failed == {"test_it.py::test_second": True}
    assert run_pytest("--lf").counts == {"passed": 1}
    assert run_pytest("-k", "third").counts == {"passed": 1, "deselected": 2}
    assert run_pytest("test_it.py::test_third").counts == {"passed": 1}


def test_output_of_the_job_is_shown_without_capturing(write, run_pytest):
    write("""
        @two_ranks
        def test_prints():
            print("hello from", comm.rank)
    """)
    ended = run_pytest("-s")
    assert "[0] hello from 0\n" in ended.output and "[1] hello from 1\n" in ended.output


def test_a_file_that_one_rank_cannot_import(write, run_pytest):
    write("""
        if comm.size == 2 and comm.rank == 1:
            raise ImportError("not on this rank")

        @two_ranks
        def test_one():
            pass

        @two_ranks
        def test_two():
            pass
    """)
    ended = run_pytest()
    assert ended.counts == {"failed": 2}
    assert "ImportError: not on this rank" in ended.failure("test_one")


def test_a_job_loads_only_what_belongs_to_its_own_tests(write, run_pytest, tmp_path):
    write("""
        @two_ranks
        def test_it():
            assert comm.size == 2
        """)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "conftest.py").write_text("import os\nassert 'PMIX_RANK' not in os.environ\n")
    (alone / "test_alone.py").write_text("def test_alone(): pass\n")
    assert run_pytest("alone", "test_it.py").counts == {"passed": 2}


def test_names_that_depend_on_the_rank(write, run_pytest):
    write("""
        @two_ranks
        @pytest.mark.parametrize("rank", [comm.rank])
        def test_it(rank):
            pass
    """)
    ended = run_pytest()
    assert ended.counts == {"failed": 1}
    assert "Every rank must collect the same tests" in ended.output


@pytest.mark.parametrize("measured", [("-m", "coverage", "run", "-m", "pytest"), ("-m", "pytest")])
def test_coverage_of_the_ranks(write, run, tmp_path, measured):
    write("""
        from package import branch

        @two_ranks
        def test_branches():
            branch(comm.rank)
    """)
    (tmp_path / "package.py").write_text(
        "def branch(rank):\n    if rank:\n        return 1\n    return 0\ndef unused():\n    pass\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        "[tool.coverage.run]\nsource = ['package']\nbranch = true\n"
    )
    with_cov = [] if "coverage" in measured else ["--cov", "--cov-report="]
    plugin = ["-p", "multimesh.pytest_plugin"]
    ended = run(sys.executable, *measured, *plugin, *with_cov)
    assert ended.counts == {"passed": 1}, ended.output
    assert run(sys.executable, "-m", "coverage", "json", "-o", "cov.json").code == 0
    measured = json.loads((tmp_path / "cov.json").read_text())["files"]["package.py"]
    assert measured["missing_lines"] == [6] and measured["missing_branches"] == []
    assert sorted(path for path in os.listdir(tmp_path) if path.startswith(".cov")) == [".coverage"]
