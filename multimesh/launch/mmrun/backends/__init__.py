"""One file per kind of mpiexec: how to start N ranks with it on this host.

Each has `command(mpiexec, ranks, rank_command)` and `environment(environ)`, pure functions.
"""

from multimesh.launch.mmrun.backends import mpich, openmpi

__all__ = ["mpich", "openmpi"]
