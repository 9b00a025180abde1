"""Fixtures: two emulated hosts, and a SLURM on them, for the whole session.

Where they cannot be had, the tests that use them are skipped, and the reason says what is missing.
"""

import contextlib

import pytest

from support import host_lab, slurm_lab

__all__ = ["hosts", "slurm"]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two emulated hosts."""
    yield from _opened(host_lab.open_hosts(tmp_path_factory.mktemp("hosts")))


@pytest.fixture(scope="session")
def slurm(hosts, tmp_path_factory):
    """A SLURM with a node on each of the two hosts."""
    yield from _opened(slurm_lab.open_slurm(tmp_path_factory.mktemp("slurm"), hosts))


def _opened(lab):
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(lab)
        except OSError as exc:
            pytest.skip(str(exc))
        yield opened
