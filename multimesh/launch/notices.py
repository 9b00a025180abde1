"""Notices from any rank to all ranks, in one order, and answers to them, without MPI.

They go through the key-value store of jax.distributed, which rank 0 keeps. Any thread may use it,
whatever the main thread is stuck in. When rank 0 does not run, a call to the store may never
return, so every call here has a time limit.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from multimesh.launch.frames import OWN_THREADS

__all__ = ["Notices"]

_COUNTER = "multimesh/notices"
_PATIENCE = 1.0  # seconds for what takes less than a millisecond
_AT_LEAST = 0.05  # seconds for each answer, whatever those before it have taken


class Notices:
    """The notices of a job.

    Args:
      store: The client of the key-value store.
      rank: This rank.
      size: Number of ranks.
    """

    def __init__(self, store, rank: int, size: int):
        self._store = store
        self._rank = rank
        self._size = size

    def post(self, *, within: float = _PATIENCE, **fields: Any) -> int | None:
        """Posts a notice to all ranks, this one included.

        Args:
          within: Seconds that rank 0 has to take it.
          fields: Its content, as JSON allows.

        Returns:
          Its number, or None if rank 0 does not take it.
        """

        def post():
            number = self._store.key_value_increment(_COUNTER, 1)
            self._store.key_value_set(_notice(number), json.dumps(fields))
            return number

        return _within(within, post)

    def read(self, number: int, seconds: float) -> dict[str, Any] | None:
        """Waits for a notice.

        Args:
          number: 1 for the first.
          seconds: How long to wait.

        Returns:
          The fields of the notice, or None if it has not come.

        Raises:
          ConnectionError: The store is gone.
        """
        text = self._get(_notice(number), seconds)
        return None if text is None else json.loads(text)

    def answer(self, number: int, **fields: Any) -> None:
        """Answers the notice of that number."""
        text = json.dumps(fields)
        _within(_PATIENCE, lambda: self._store.key_value_set(_answer(number, self._rank), text))

    def answers(self, number: int, seconds: float) -> dict[int, dict[str, Any]]:
        """Collects the answers to a notice, by rank, of those that answer within some seconds."""
        deadline = time.monotonic() + seconds
        found = {}
        for rank in range(self._size):
            with suppress(ConnectionError):
                left = max(_AT_LEAST, deadline - time.monotonic())
                text = self._get(_answer(number, rank), left)
                if text is not None:
                    found[rank] = json.loads(text)
        return found

    def _get(self, key, seconds):
        try:
            return self._store.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as exc:
            if "DEADLINE_EXCEEDED" in str(exc):
                return None
            raise ConnectionError("The key-value store of jax.distributed is gone.") from exc


def _notice(number):
    return f"{_COUNTER}/{number}"


def _answer(number, rank):
    return f"multimesh/answers/{number}/{rank}"


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Makes a call that may never return; None if it has not within `seconds`, or failed."""
    results = []

    def run():
        with suppress(jax.errors.JaxRuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name=f"{OWN_THREADS} call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
