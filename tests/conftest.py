"""All tests see eight CPU devices; under `mpirun` they are shared by the ranks."""

import os

import jax
from support.jobs import COMPILE_QUICKLY
from support.labs import hosts, slurm  # noqa: F401  (fixtures)

from multimesh import init


def _start():
    """Starts JAX with little optimization: the tests compile far more than they compute.

    The flag is read when the backend starts; programs that tests start do not inherit it.
    """
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} {COMPILE_QUICKLY['XLA_FLAGS']}"
    init(cpus=8)
    jax.devices()
    if before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = before


_start()
