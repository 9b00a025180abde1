"""Chooses how the ranks of this job talk to each other."""

import functools

import jax

from multimesh import _mpi
from multimesh.config import read_config
from multimesh.errors import StartupError
from multimesh.transport.base import Group, Transport
from multimesh.transport.group import LocalGroup, MpiGroup
from multimesh.transport.local import LocalTransport
from multimesh.transport.mpi import MpiTransport

__all__ = ["connect"]


@functools.cache
def connect() -> tuple[Group, Transport]:
    """Connects the ranks: within the process where there is one, else by MPI.

    Collective on its first call. All steps of a process share the connection, so that the channels
    of one step never have the tags of another's. With MULTIMESH_POISON=1, receive buffers are
    filled with NaNs before use.

    Returns:
      The control plane and the transport.

    Raises:
      StartupError: MPI and JAX number the ranks differently.
    """
    if jax.process_count() == 1:
        return LocalGroup(), LocalTransport()
    communicator = _mpi.communicator()
    got = (communicator.rank, communicator.size)
    expected = (jax.process_index(), jax.process_count())
    if got != expected:
        raise StartupError(
            f"MPI and JAX must number the ranks alike. Got MPI rank and size {got}, JAX process "
            f"and count {expected}; start JAX by multimesh.init()."
        )
    config = read_config()
    group = MpiGroup(communicator, config.stall_timeout)
    transport = MpiTransport(communicator, config.stall_timeout, poison=config.poison)
    return group, transport
