"""A SLURM for the tests of this folder: one that is up already, or none."""

import pytest
from support import slurm


@pytest.fixture(scope="session")
def slurm_nodes():
    """Number of nodes of the SLURM; skips where there is none."""
    nodes = slurm.node_count()
    if not nodes:
        pytest.skip("there is no SLURM")
    return nodes


@pytest.fixture(scope="session")
def two_slurm_nodes(slurm_nodes):
    """Skips where the SLURM has a single node."""
    if slurm_nodes < 2:
        pytest.skip("this SLURM has a single node")
