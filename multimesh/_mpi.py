"""The only file that imports mpi4py.

mpi4py starts MPI when it is imported, so the import happens only where a launcher has started
several ranks. multimesh talks on a private duplicate of COMM_WORLD: messages of the user's own
mpi4py code, with any tag and any source, cannot meet ours.
"""

import functools

__all__ = ["communicator", "load"]


@functools.cache
def load():
    """Imports `mpi4py.MPI`, which starts MPI.

    Returns:
      The module `mpi4py.MPI`.
    """
    from mpi4py import MPI

    return MPI


@functools.cache
def communicator():
    """The private communicator of this job.

    Collective on its first call: every rank must make it.

    Returns:
      A duplicate of COMM_WORLD that nothing else uses.
    """
    return load().COMM_WORLD.Dup()
