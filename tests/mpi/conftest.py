"""For tests that run inside every rank: `mpirun -n 2 python -m pytest tests/mpi`.

All ranks run the same tests in the same order. A test that fails on one rank ends the job, since
the others would wait for it.
"""

import sys

import pytest

from multimesh import _mpi, init

pytest.register_assert_rewrite("support.transport_contract")
init(cpus=8)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    communicator = _mpi.communicator()
    if report.failed and communicator.size > 1:
        print(f"rank {communicator.rank}: {report.nodeid}\n{report.longrepr}", file=sys.stderr)
        communicator.Abort(1)
