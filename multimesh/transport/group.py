"""The control plane: how ranks compare plans, share one order and meet before the first step."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

from multimesh.errors import RankMismatchError
from multimesh.launch.activity import Wait
from multimesh.transport.waiting import wait_for_ranks

__all__ = ["LocalGroup", "MpiGroup"]

_LABEL = 48  # bytes of what a call is for that are compared
_MEETING = _LABEL + 8  # bytes that a rank says of a call: its label, and how many bytes follow
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
    starts with a meeting, in which the ranks make sure that they are there for the same. None of
    them blocks inside MPI: a rank that waits polls, more and more seldom, says what it waits for,
    and stops when the others do not come.

    Args:
      communicator: An mpi4py communicator that nothing else uses collectively.
      stall_timeout: Seconds to wait for the other ranks.
      message_limit: Bytes that MPI moves at once; counts and offsets are 32-bit integers there.
    """

    def __init__(self, communicator, stall_timeout: float, message_limit: int = 2**31 - 1):
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._stall_timeout = stall_timeout
        self._piece = max(1, message_limit // self.size)

    def allgather(self, obj: Any, for_what: str) -> list[Any]:
        """Returns the objects of all ranks, in order of rank; they travel pickled."""

        def start(mine, everyone, counts):
            return self._communicator.Iallgatherv(mine, [everyone, counts])

        return self._collect(start, obj, for_what)

    def gather(self, obj: Any, for_what: str, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks on rank `root`, None elsewhere; they travel pickled."""

        def start(mine, everyone, counts):
            received = [everyone, counts] if self.rank == root else None
            return self._communicator.Igatherv(mine, received, root)

        return self._collect(start, obj, for_what, is_receiver=self.rank == root)

    def broadcast(self, obj: Any, for_what: str, root: int = 0) -> Any:
        """Returns the object that rank `root` gave; it travels pickled."""
        mine = _pickled(obj) if self.rank == root else b""
        size = self._meet(for_what, len(mine))[root]
        data = memoryview(bytearray(mine.ljust(size)))
        for start in range(0, size, self._piece):
            piece = data[start : start + self._piece]
            self._wait(self._communicator.Ibcast(piece, root), for_what)
        return obj if self.rank == root else pickle.loads(data)

    def barrier(self, for_what: str) -> None:
        """Returns when every rank has called it."""
        self._meet(for_what, 0)

    def _collect(self, start, obj, for_what, *, is_receiver=True):
        """Has `start` move the objects of all ranks, piece by piece."""
        mine = memoryview(_pickled(obj))
        sizes = self._meet(for_what, len(mine))
        received = [bytearray() for _ in sizes]
        for first in range(0, max(sizes), self._piece):
            counts = [min(max(size - first, 0), self._piece) for size in sizes]
            everyone = bytearray(sum(counts) if is_receiver else 0)
            self._wait(start(mine[first : first + self._piece], everyone, counts), for_what)
            for whole, piece in zip(received, _split(everyone, counts), strict=True):
                whole += piece
        return [pickle.loads(each) for each in received] if is_receiver else None

    def _meet(self, for_what, size):
        """Waits until every rank is here for the same; returns the `size` that each has given."""
        label = for_what.encode()[:_LABEL].ljust(_LABEL)
        mine = label + size.to_bytes(_MEETING - _LABEL, "big")
        everyone = bytearray(self.size * _MEETING)
        self._wait(self._communicator.Iallgather(mine, everyone), for_what)
        calls = _split(everyone, [_MEETING] * self.size)
        for rank, call in enumerate(calls):
            if call[:_LABEL] != calls[0][:_LABEL]:
                raise RankMismatchError(
                    "Every rank must make the same calls in the same order, but rank 0 is at "
                    f"{_text(calls[0])}, and rank {rank} at {_text(call)}. Look for a call that "
                    "only some ranks make, or for an error that only some of them caught."
                )
        return [int.from_bytes(call[_LABEL:], "big") for call in calls]

    def _wait(self, request, for_what):
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        wait_for_ranks(
            request.Test,
            self._stall_timeout,
            _LONGEST_SLEEP,
            lambda: Wait(others, f"reach the same point of the program: {for_what}"),
            self.rank,
        )


def _pickled(obj: Any) -> bytes:
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)


def _split(data: bytearray, counts: Sequence[int]) -> list[bytearray]:
    """Pieces of so many bytes; what is missing at the end makes them shorter."""
    ends = list(itertools.accumulate(counts, initial=0))
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _text(call: bytearray) -> str:
    return call[:_LABEL].decode(errors="replace").strip()
