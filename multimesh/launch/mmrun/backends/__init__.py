"""One file per kind of starter: how to start N ranks with it.

Each has `command(...)`, the command line, and `environment(environ)`, both pure functions.
"""

from multimesh.launch.mmrun.backends import mpich, openmpi, srun

__all__ = ["mpich", "openmpi", "srun"]
