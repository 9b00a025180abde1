"""The part that each other rank writes of a checkpoint, and how rank 0 hears that it is done.

It is said through the key-value store of jax.distributed: threads wait for it, which must not call
MPI. What went wrong is told as well, so that nobody waits for a rank that has failed.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from multimesh._compat import coordination_store
from multimesh.checkpoint.shards import OwnShards, write

__all__ = ["Part", "wait_for_parts"]

_POLL = 1.0  # seconds of one call to the store; a save may take hours


class Part:
    """Writes this rank's part in a thread.

    Args:
      mark: The name of the save, the same on every rank.
      state: What this rank writes, by name.
      folder: The folder that rank 0 made.
    """

    def __init__(self, mark: str, state: Mapping[str, OwnShards], folder: Path):
        self.problem = ""  # what went wrong, once the thread has ended
        self._thread = threading.Thread(
            target=self._run, args=(mark, state, folder), name="multimesh checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until it is written, or has failed."""
        self._thread.join()

    def _run(self, mark, state, folder):
        try:
            asyncio.run(write(state, folder))
        except Exception as error:
            self.problem = f"rank {jax.process_index()}: {error}"
        coordination_store().key_value_set(_key(mark, jax.process_index()), self.problem or "done")


def wait_for_parts(mark: str, ranks: Iterable[int]) -> None:
    """Waits until other ranks have written their parts.

    Args:
      mark: The name of the save.
      ranks: Who has one.

    Raises:
      OSError: One could not; the message names it.
    """
    for rank in ranks:
        said = _take(_key(mark, rank))
        if said != "done":
            raise OSError(said)


def _take(key: str) -> str:
    store = coordination_store()
    while True:
        try:
            said = store.blocking_key_value_get(key, int(_POLL * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        else:
            store.key_value_delete(key)
            return said


def _key(mark: str, rank: int) -> str:
    return f"multimesh/checkpoints/{mark}/{rank}"
