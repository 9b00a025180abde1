"""tests/mpi run inside every rank of an MPI job.

By hand: `mpirun -n 2 python -m pytest tests/mpi`. All ranks run the same tests in the same order; a
test that fails on one rank ends the job, since the others would wait for it.

A plain `python -m pytest` starts one such job for each file and number of ranks, with a time limit,
and shows the output of a job that fails. The process that starts them has no MPI itself: MPI cannot
be started a second time in one process, nor survive a test that kills a rank.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import clean_environment
from support.synchronous import Synchronous

from multimesh import _mpi
from multimesh.launch.environment import detect_launcher
from multimesh.launch.mmrun.backends import mpich, openmpi
from multimesh.launch.mmrun.library import find_mpi

RANKS = (1, 2, 4)
SLOW_RANKS = 2  # tests marked slow run in a job of their own, which is marked slow too
TIME_LIMIT = 900  # seconds for one job; the longest takes about a third on two idle cores
# A buffer that is read too early shows as NaN.
POISON = {"MULTIMESH_POISON": "1"}
# MPI sends small messages before they are asked for. In these jobs it never does: the smallest
# limit that Open MPI takes is 80 bytes, so the sends are synchronous too.
NEVER_EAGER = {"OMPI_MCA_btl_sm_eager_limit": "80", "TESTS_SYNCHRONOUS_SENDS": "1"}
NEVER_EAGER_FILES = ("test_hangs.py",)

INSIDE_A_RANK = detect_launcher() is not None

pytest.register_assert_rewrite("support.transport_contract")

if os.environ.get("TESTS_SYNCHRONOUS_SENDS"):
    _mpi.communicator = functools.cache(lambda make=_mpi.communicator: Synchronous(make()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if not report.failed or not INSIDE_A_RANK:
        return
    communicator = _mpi.communicator()
    if communicator.size > 1:
        print(f"rank {communicator.rank}: {report.nodeid}\n{report.longrepr}", file=sys.stderr)
        sys.stderr.flush()
        communicator.Abort(1)


def pytest_pycollect_makemodule(module_path, parent):
    return None if INSIDE_A_RANK else JobFile.from_parent(parent, path=module_path)


class JobFile(pytest.File):
    """A test file, as the MPI jobs that run it."""

    def collect(self):
        for ranks in RANKS:
            yield self.job(f"{ranks}_ranks", ranks)
        if self.path.name in NEVER_EAGER_FILES:
            yield self.job("2_ranks_never_eager", 2, NEVER_EAGER)
        if "@pytest.mark.slow" in self.path.read_text():
            job = self.job(f"{SLOW_RANKS}_ranks_slow", SLOW_RANKS, select="slow")
            job.add_marker(pytest.mark.slow)
            yield job

    def job(self, name, ranks, variables=None, select="not slow"):
        variables = POISON | (variables or {})
        return Job.from_parent(self, name=name, ranks=ranks, variables=variables, select=select)


class Job(pytest.Item):
    """One MPI job that runs a test file in each of its ranks."""

    def __init__(self, *, ranks, variables, select, **kwargs):
        super().__init__(**kwargs)
        self.ranks = ranks
        self.select = select
        self.variables = variables

    def runtest(self):
        mpi = find_mpi(sys.executable)
        backend = {"openmpi": openmpi, "mpich": mpich}[mpi.kind]
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        program = [*pytest_command, "-m", self.select, str(self.path)]
        environ = backend.environment(clean_environment()) | self.variables
        try:
            ended = subprocess.run(
                backend.command(mpi.mpiexec, self.ranks, program),
                env=environ,
                cwd=Path(self.config.rootpath),
                timeout=TIME_LIMIT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as exc:
            raise JobFailed(f"no end after {TIME_LIMIT} s", exc.stdout or b"") from None
        if ended.returncode:
            raise JobFailed(f"exit code {ended.returncode}", ended.stdout)

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, JobFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, None, f"{self.path.name} under {self.name.replace('_', ' ')}"


class JobFailed(Exception):
    """A job did not end with code 0. Shows the end of its output."""

    def __init__(self, how, output):
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        super().__init__(f"The job failed: {how}. Its output:\n" + text[-20_000:])
