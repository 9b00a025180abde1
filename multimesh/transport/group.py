"""The control plane: how ranks compare plans, share one order and meet before the first step."""

from typing import Any

from multimesh.errors import RankMismatchError
from multimesh.launch.activity import Wait
from multimesh.transport.waiting import wait_for_ranks

__all__ = ["LocalGroup", "MpiGroup"]

_LABEL = 48  # bytes of what a call is for that are compared
_LONGEST_SLEEP = 1e-3  # seconds: another rank may compile for minutes


class LocalGroup:
    """The group of a single process. See `base.Group`."""

    rank = 0
    size = 1

    def allgather(self, obj: Any, for_what: str) -> list[Any]:
        """Returns the one object, in a list."""
        del for_what
        return [obj]

    def gather(self, obj: Any, for_what: str, root: int = 0) -> list[Any]:
        """Returns the one object, in a list."""
        del for_what, root
        return [obj]

    def broadcast(self, obj: Any, for_what: str, root: int = 0) -> Any:
        """Returns the object."""
        del for_what, root
        return obj

    def barrier(self, for_what: str) -> None:
        """Does nothing."""


class MpiGroup:
    """The ranks of an MPI communicator. See `base.Group`.

    A rank may come to a collective long before another that still compiles, so every collective
    starts with a meeting that does not poll at full speed, and in which the ranks make sure that
    they are there for the same.

    Args:
      communicator: An mpi4py communicator that nothing else uses collectively.
      stall_timeout: Seconds to wait for the other ranks.
    """

    def __init__(self, communicator, stall_timeout: float):
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._stall_timeout = stall_timeout

    def allgather(self, obj: Any, for_what: str) -> list[Any]:
        """Returns the objects of all ranks, in order of rank; they travel pickled."""
        self.barrier(for_what)
        return self._communicator.allgather(obj)

    def gather(self, obj: Any, for_what: str, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on rank `root`, None elsewhere; they travel pickled."""
        self.barrier(for_what)
        return self._communicator.gather(obj, root)

    def broadcast(self, obj: Any, for_what: str, root: int = 0) -> Any:
        """Returns the object that rank `root` gave; it travels pickled."""
        self.barrier(for_what)
        return self._communicator.bcast(obj, root)

    def barrier(self, for_what: str) -> None:
        """Returns when every rank has called it."""
        mine = for_what.encode()[:_LABEL].ljust(_LABEL)
        everyone = bytearray(self.size * _LABEL)
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        wait_for_ranks(
            self._communicator.Iallgather(mine, everyone).Test,
            self._stall_timeout,
            _LONGEST_SLEEP,
            lambda: Wait(others, f"reach the same point of the program: {for_what}"),
            self.rank,
        )
        calls = [
            bytes(everyone[start : start + _LABEL]) for start in range(0, len(everyone), _LABEL)
        ]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise RankMismatchError(
                    "Every rank must make the same calls in the same order, but rank 0 is at "
                    f"{_text(calls[0])}, and rank {rank} at {_text(call)}. Look for a call that "
                    "only some ranks make, or for an error that only some of them caught."
                )


def _text(label: bytes) -> str:
    return label.decode(errors="replace").strip()
