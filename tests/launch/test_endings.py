"""Ways to end that Python, or MPI, would take for no failure or would wait in."""

import re

import pytest

ATEXIT = """
    import atexit, os
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    {start}
    def hook():
        raise ValueError("mine")
    if rank == 1:
        atexit.register(hook)
"""


def test_an_exception_in_an_exit_hook_fails_the_job(mmrun, write):
    ended = mmrun(2, write(ATEXIT.format(start="")))
    assert ended.code == 1
    errors = ended.stderr.splitlines()
    assert errors[-2] == "[1] ValueError: mine"
    assert re.fullmatch(r"mmrun: rank 1 on \S+ failed with exit code 1", errors[-1])
    assert ended.output.count("Traceback") == 1
    assert "Exception ignored" not in ended.output


def test_an_exception_in_an_exit_hook_fails_the_job_without_mmrun(mpirun, write):
    ended = mpirun(2, write(ATEXIT.format(start="import multimesh; multimesh.init(cpus=2)")))
    assert ended.code == 1
    assert re.search(r"uncaught exception on rank 1 of 2", ended.stderr)
    assert ended.output.count("Traceback") == 1


def test_an_error_code_does_not_wait_for_a_thread_that_is_left(mpirun, write):
    script = write(
        """
        import sys, threading, time
        import multimesh
        multimesh.init(cpus=2)
        import jax
        if jax.process_index() == 1:
            threading.Thread(target=threading.Event().wait).start()
            sys.exit(3)
        time.sleep(80)
        """
    )
    assert mpirun(2, script).code == 3


def test_an_abort_is_not_taken_for_the_end_of_the_others(mmrun, write):
    script = write(
        """
        import os, time
        import multimesh
        multimesh.init(cpus=2)
        import jax
        if jax.process_index() == 1:
            os.abort()
        time.sleep(80)
        """
    )
    ended = mmrun(2, script)
    assert ended.code == 134
    expected = r"mmrun: rank 1 on \S+ was killed by SIGABRT: exit code 134"
    assert re.fullmatch(expected, ended.stderr.splitlines()[-1])


def test_the_start_has_a_limit_without_mmrun(mpirun, write):
    script = write(
        """
        import os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(80)
        import multimesh
        multimesh.init(cpus=2)
        """
    )
    ended = mpirun(2, script, MULTIMESH_START_TIMEOUT="2")
    assert ended.code == 1
    assert "_wait_until_every_rank_calls_init" in ended.stderr
    assert f'File "{script}", line 6' in ended.stderr


EXCEPTION = """
    import os
    class Mute(Exception):
        def __str__(self):
            raise ValueError
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise {exception}
"""


@pytest.mark.parametrize(
    ("exception", "last"),
    [
        ("OSError('no \\udcff')", r"OSError: no \\udcff"),
        ("Mute", r"Mute: <exception str\(\) failed>"),
    ],
    ids=["not-utf-8", "mute"],
)
def test_an_exception_that_cannot_be_written_is_shown_all_the_same(mmrun, write, exception, last):
    ended = mmrun(2, write(EXCEPTION.format(exception=exception)))
    assert ended.code == 1
    errors = ended.stderr.splitlines()
    assert re.fullmatch(rf"\[1\] .*{last}", errors[-2]), ended.stderr
    assert errors[-1].startswith("mmrun: rank 1 on ")
    assert ended.output.count("Traceback") == 1


@pytest.mark.parametrize("launcher", ["mmrun", "mpirun"])
def test_a_forked_child_is_no_rank(request, write, launcher):
    script = write(
        """
        import os
        import multimesh
        multimesh.init(cpus=2)
        child = os.fork()
        if child == 0:
            raise ValueError("of the child")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        print("went on")
        """
    )
    ended = request.getfixturevalue(launcher)(2, script)
    assert ended.code == 0, ended.output
    assert ended.stdout.count("went on") == 2
    assert ended.stderr.count("ValueError: of the child") == 2
