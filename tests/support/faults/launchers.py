"""How each launcher starts the program, and whether this machine has it.

The ranks' MPI is that of their interpreter: this process's own, and a second one, with the other
MPI, that TESTS_MPICH_PYTHON names.
"""

import functools
import os
import sys

from multimesh.errors import StartupError
from multimesh.launch.mmrun.library import find_mpi
from support.faults.cells import Launcher
from support.jobs import REPOSITORY

__all__ = ["command", "why_unavailable"]

MPICH_VARIABLE = "TESTS_MPICH_PYTHON"


def command(launcher: Launcher, ranks: int, program: list[str]) -> list[str]:
    """The command line that starts a Python program on so many ranks of this host."""
    python = _interpreter(launcher.mpi)
    number = ["-n", str(ranks)]
    if launcher.is_mmrun:
        return [python, str(REPOSITORY / "scripts" / "mmrun"), *number, python, *program]
    if launcher.plugin:
        options = ["--nodes=1", "--overcommit", "--kill-on-bad-exit=1", "--quiet"]
        start = ["srun", f"--mpi={launcher.plugin}", *options]
    else:
        start = [find_mpi(python).mpiexec, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [*start, *number, python, *program]


def why_unavailable(launcher: Launcher) -> str:
    """Why the ranks' Python is not to be had; empty if it is. SLURM is for the caller to open."""
    if _interpreter(launcher.mpi) is None:
        return f"no Python whose mpi4py loads {launcher.mpi}; {MPICH_VARIABLE} may name a second"
    return ""


@functools.cache
def _interpreter(mpi):
    for python in filter(None, (sys.executable, os.environ.get(MPICH_VARIABLE))):
        try:
            if find_mpi(python).kind == mpi:
                return python
        except StartupError:
            continue
    return None
