"""Ways to end that Python, or MPI, would take for no failure or would wait in."""

import re

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
