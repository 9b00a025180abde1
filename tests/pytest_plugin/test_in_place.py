"""Under a launcher the same files run in place: rank 0 reports for all."""

import re


def test_rank_0_reports_for_all(write, run_in_place):
    write("""
        @two_ranks
        def test_passes():
            assert comm.allreduce(1) == 2

        @two_ranks
        def test_fails_on_one():
            print("printed by", comm.rank)
            assert comm.rank == 0, "only here"

        @two_ranks
        @pytest.mark.xfail
        def test_expected_to_fail_on_one():
            assert comm.rank == 0

        @two_ranks
        @pytest.mark.skipif(comm.rank == 1, reason="not here")
        def test_skipped_on_one():
            pass

        @pytest.mark.mpi(ranks=(2, 4))
        def test_numbers():
            assert comm.size == 2

        @pytest.mark.mpi(ranks=2, env={"NOT_SET": "1"})
        def test_variable():
            pass
    """)
    ended = run_in_place(2, "-rs")
    assert ended.code == 1
    assert ended.counts == {"passed": 3, "failed": 1, "skipped": 2, "xfailed": 1}
    assert len(re.findall("test session starts", ended.output)) == 1
    shown = ended.failure("test_fails_on_one")
    assert re.match(r"-+ rank 1 of 2 on \S+ -+\n", shown)
    assert "AssertionError: only here" in shown and "printed by 0" in shown
    assert "needs 4 ranks; 2 are running" in ended.output
    assert "needs the environment variables NOT_SET=1" in ended.output


def test_a_rank_that_fails_while_the_other_waits_ends_the_job(write, run_in_place):
    write("""
        @two_ranks
        def test_others_wait():
            assert comm.rank == 0, "gone"
            comm.recv(source=1)
    """)
    ended = run_in_place(2)
    assert ended.code == 1
    assert re.search(r"rank 1 of 2 on \S+: test_it.py::test_others_wait", ended.output)
    assert "AssertionError: gone" in ended.output


def test_the_watchdog_ends_a_test_that_hangs(write, run_in_place):
    write("""
        @pytest.mark.mpi(ranks=2, timeout=2)
        def test_hangs():
            comm.recv(source=1 - comm.rank)
    """)
    ended = run_in_place(2)
    assert ended.code != 0
    assert len(re.findall(r'test_it.py", line \d+ in test_hangs', ended.output)) == 2
    assert re.search(r"test_it.py::test_hangs took longer than its time limit", ended.output)
