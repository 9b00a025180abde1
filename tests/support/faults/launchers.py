"""How each launcher starts the program, and whether this machine has it.

The ranks' MPI is that of their interpreter: this process's own, and a second one, with the other
MPI, that TESTS_MPICH_PYTHON names.
"""

import functools
import os
import shutil
import subprocess
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
    if launcher.name == "mpirun":
        start = [find_mpi(python).mpiexec, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    else:
        plugin = launcher.name.removeprefix("srun-")
        start = ["srun", f"--mpi={plugin}", "--overcommit", "--kill-on-bad-exit=1", "--quiet"]
    return [*start, *number, python, *program]


@functools.cache
def why_unavailable(launcher: Launcher) -> str:
    """Why this machine cannot run a launcher's cells; empty if it can."""
    if _interpreter(launcher.mpi) is None:
        return f"{MPICH_VARIABLE} names no Python whose mpi4py loads {launcher.mpi}"
    if launcher.name.startswith("srun"):
        return _why_no_slurm(launcher.name.removeprefix("srun-"))
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


@functools.cache
def _why_no_slurm(plugin):
    if shutil.which("srun") is None:
        return "there is no SLURM"
    if not _output("sinfo", "--noheader", "--states=idle,alloc,mix").strip():
        return "no SLURM node is up"
    if plugin not in _output("srun", "--mpi=list"):
        return f"this SLURM has no {plugin}"
    return ""


def _output(*words):
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return ""
    return result.stdout + result.stderr
