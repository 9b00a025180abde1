"""Starts a script on several ranks, as a user would, from a process that has no MPI."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["COMPILE_QUICKLY", "clean_environment", "run_script"]

REPOSITORY = Path(__file__).resolve().parents[2]
# Variables by which a launcher tells a process its rank; an outer job's must not leak in.
LAUNCHER_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
# For programs that compile far more than they compute.
COMPILE_QUICKLY = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
}


def clean_environment():
    """This process's environment without an outer job, and with this checkout importable."""
    environ = {
        name: value
        for name, value in os.environ.items()
        # SLURM_CONF says which SLURM to use, if any.
        if not name.startswith(LAUNCHER_PREFIXES) or name == "SLURM_CONF"
    }
    paths = (str(REPOSITORY), str(REPOSITORY / "tests"), environ.get("PYTHONPATH"))
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_script(path, ranks, timeout=60):
    """Runs `mmrun -n RANKS python PATH` and returns the completed process.

    Raises:
      subprocess.TimeoutExpired: It took longer than `timeout` seconds.
    """
    command = [sys.executable, "-m", "multimesh.launch.mmrun", "-n", str(ranks)]
    return subprocess.run(
        [*command, sys.executable, str(path)],
        env=clean_environment(),
        cwd=Path(path).parent,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
