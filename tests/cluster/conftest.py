"""The MPIs that jobs on a cluster are tried with."""

import os
import sys

import pytest

from multimesh.launch.mmrun.library import find_mpi

VARIABLE = "TESTS_MPICH_PYTHON"


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request):
    """(kind, interpreter) of each MPI."""
    python = sys.executable if request.param == "openmpi" else os.environ.get(VARIABLE)
    if python is None or find_mpi(python).kind != request.param:
        pytest.skip(f"no Python whose mpi4py loads {request.param} (see {VARIABLE} in .ci/run)")
    return request.param, python
