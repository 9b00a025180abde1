"""A SLURM and two hosts for the tests of this folder; without them its tests are skipped."""

import contextlib

import pytest
from support import host_lab, slurm


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two emulated hosts."""
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(host_lab.open_hosts(tmp_path_factory.mktemp("hosts")))
        except OSError as exc:
            pytest.skip(f"there are no emulated hosts: {exc}")
        yield lab


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
