"""The control plane: how ranks compare plans, share one order and meet before the first step."""

from typing import Any

from multimesh.launch.activity import Wait
from multimesh.transport.waiting import wait_for_ranks

__all__ = ["LocalGroup", "MpiGroup"]

_LONGEST_SLEEP = 1e-3  # seconds: another rank may compile for minutes


class LocalGroup:
    """The group of a single process. See `base.Group`."""

    rank = 0
    size = 1

    def allgather(self, obj: Any) -> list[Any]:
        """Returns the one object, in a list."""
        return [obj]

    def gather(self, obj: Any, root: int = 0) -> list[Any]:
        """Returns the one object, in a list."""
        del root
        return [obj]

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """Returns the object."""
        del root
        return obj

    def barrier(self) -> None:
        """Does nothing."""


class MpiGroup:
    """The ranks of an MPI communicator. See `base.Group`.

    A rank may come to a collective long before another that still compiles, so every collective
    starts with a barrier that does not poll at full speed.

    Args:
      communicator: An mpi4py communicator that nothing else uses collectively.
      stall_timeout: Seconds to wait for the other ranks.
    """

    def __init__(self, communicator, stall_timeout: float):
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._stall_timeout = stall_timeout

    def allgather(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in order of rank; they travel pickled."""
        self.barrier()
        return self._communicator.allgather(obj)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on rank `root`, None elsewhere; they travel pickled."""
        self.barrier()
        return self._communicator.gather(obj, root)

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """Returns the object that rank `root` gave; it travels pickled."""
        self.barrier()
        return self._communicator.bcast(obj, root)

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Raises:
          StallError: Another rank did not come within the timeout, or has ended.
        """
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        wait_for_ranks(
            self._communicator.Ibarrier().Test,
            self._stall_timeout,
            _LONGEST_SLEEP,
            lambda: Wait(others, "reach the same point of the program"),
            self.rank,
        )
