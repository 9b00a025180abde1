"""MPI messages of plain bytes: sending without waiting, receiving, and waiting with patience."""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multimesh import _mpi
from multimesh.launch.activity import Wait
from multimesh.transport.waiting import wait_for_ranks

__all__ = ["MESSAGE_LIMIT", "Mailbox"]

# Where it may not copy from process to process, MPI moves a large message in pieces of some 32 KiB,
# and only while both sides poll: with sleeps of 1 ms, 4 MiB took 100 ms in place of 5.
_LONGEST_SLEEP = 50e-6  # seconds
MESSAGE_LIMIT = 1 << 30  # bytes: MPI counts in C ints, which end at 2 GiB


@dataclass(frozen=True)
class _Sending:
    """A payload on its way. It is kept here, since MPI reads it until its requests are done."""

    requests: list[Any]
    payload: np.ndarray
    target: int
    name: str
    microbatch: int


class Mailbox:
    """Sends and receives bytes on one communicator.

    Between two ranks, payloads with one tag arrive in the order in which they were sent.

    Args:
      communicator: An mpi4py communicator that nothing else sends on.
      message_limit: Longer payloads are split into messages of at most so many bytes.
      stall_timeout: Seconds to wait for other ranks.
    """

    def __init__(self, communicator, message_limit: int, stall_timeout: float):
        self._mpi = _mpi.load()
        self.rank: int = communicator.rank
        self.max_tag: int = communicator.Get_attr(self._mpi.TAG_UB)
        self.stall_timeout = stall_timeout
        self._communicator = communicator
        self._message_limit = message_limit
        self._sending: deque[_Sending] = deque()

    def send(self, payload: np.ndarray, target: int, tag: int, name: str, microbatch: int) -> None:
        """Starts to send bytes, which must not change until they have left.

        Args:
          payload: Contiguous, one-dimensional, uint8.
          target: The rank that receives.
          tag: Must be the same on the receiver.
          name: Of the transfer, for errors.
          microbatch: For errors.
        """
        requests = [
            self._communicator.Isend([chunk, self._mpi.BYTE], target, tag)
            for chunk in self._chunks(payload)
        ]
        self._sending.append(_Sending(requests, payload, target, name, microbatch))

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> list[Any]:
        """Starts to receive bytes, as many as were sent; the arguments are those of `send`.

        Returns:
          The requests to wait for.
        """
        return [
            self._communicator.Irecv([chunk, self._mpi.BYTE], source, tag)
            for chunk in self._chunks(buffer)
        ]

    def wait(self, requests: list[Any], describe: Callable[[], Wait]) -> None:
        """Waits until all requests are done.

        Args:
          requests: What to wait for.
          describe: Says which ranks have not done what yet.

        Raises:
          StallError: They were not done within the timeout, or a rank has ended.
        """
        wait_for_ranks(
            lambda: self.done(requests), self.stall_timeout, _LONGEST_SLEEP, describe, self.rank
        )

    def done(self, requests: list[Any]) -> bool:
        """Whether all requests are done."""
        return self._mpi.Request.Testall(requests)

    def collect(self) -> None:
        """Lets go of payloads that have left."""
        sending = self._sending
        while sending and self.done(sending[0].requests):
            sending.popleft()

    def flush(self) -> None:
        """Waits until everything has left.

        Raises:
          StallError: A payload did not leave within the timeout, or its receiver has ended.
        """
        while self._sending:
            first = self._sending[0]
            until = f"receive microbatch {first.microbatch} of {first.name} from rank {self.rank}"
            self.wait(first.requests, functools.partial(Wait, (first.target,), until))
            self._sending.popleft()

    def cancel(self, requests: list[Any]) -> None:
        """Gives up receives; their buffers are free afterwards."""
        for request in requests:
            request.Cancel()
        self._mpi.Request.Waitall(requests)

    def _chunks(self, data: np.ndarray) -> list[np.ndarray]:
        limit = self._message_limit
        if data.size <= limit:
            return [data]
        return [data[start : start + limit] for start in range(0, data.size, limit)]
