"""A rank that fails while the others wait for it, in JAX and in MPI, with and without mmrun."""

import re

import pytest

SCRIPT = """
    import sys, time
    import multimesh
    multimesh.init(cpus={ranks})
    import jax
    from jax.experimental import multihost_utils
    from mpi4py import MPI

    class Mine(Exception): pass

    def end():
        print("fails at", time.time(), flush=True)
        {ending}

    multihost_utils.sync_global_devices("everyone is here")
    if jax.process_index() == {failing}:
        end()
    elif jax.process_index() % 2:
        MPI.COMM_WORLD.recv(source={failing})
    else:
        multihost_utils.sync_global_devices("never")
"""


@pytest.mark.parametrize(
    ("launcher", "ranks", "failing", "ending", "code"),
    [
        ("mmrun", 2, 0, "raise Mine", 1),
        ("mmrun", 4, 3, "raise Mine", 1),
        ("mpirun", 2, 0, "raise Mine", 1),
        ("mpirun", 2, 1, "raise Mine", 1),
        ("mpirun", 4, 3, "raise Mine", 1),
        ("mpirun", 2, 0, "sys.exit(3)", 3),
    ],
)
def test_the_job_ends_soon_with_the_first_failure(
    request, write, launcher, ranks, failing, ending, code
):
    script = write(SCRIPT.format(ranks=ranks, failing=failing, ending=ending))
    ended = request.getfixturevalue(launcher)(ranks, script)
    began = float(re.search(r"fails at ([\d.]+)", ended.stdout)[1])
    assert ended.at - began < 10
    assert ended.code == code, ended.output
    is_exception = ending == "raise Mine"
    assert ended.output.count("Traceback") == is_exception
    assert len(re.findall(r"\bMine$", ended.output, re.MULTILINE)) == 2 * is_exception
    if launcher == "mmrun":
        assert ended.stderr.splitlines()[-1].startswith(f"mmrun: rank {failing} on ")
        assert "MPI_ABORT" not in ended.stderr
