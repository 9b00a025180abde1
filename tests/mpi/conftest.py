"""tests/mpi run inside every rank of MPI jobs. multimesh's pytest plugin starts them.

By hand: `mpirun -n 2 python -m pytest tests/mpi` runs those for 2 ranks.
"""

import functools
import os

import pytest
from support.synchronous import Synchronous

from multimesh import _mpi
from multimesh.jax import clear_tasks
from multimesh.launch.environment import detect_launcher

pytest.register_assert_rewrite("support.transport_contract")

if detect_launcher() is not None:
    # A buffer that is read too early shows as NaN.
    os.environ["MULTIMESH_POISON"] = "1"
if os.environ.get("TESTS_SYNCHRONOUS_SENDS"):
    _mpi.communicator = functools.cache(lambda make=_mpi.communicator: Synchronous(make()))


@pytest.fixture
def no_tasks():
    """No task is registered before the test, nor after it."""
    clear_tasks()
    yield
    clear_tasks()
