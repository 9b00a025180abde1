"""Orbax's checkpoint manager, set up for ranks that hold different leaves.

Orbax keeps the last checkpoints, writes in the background and renames a folder when all of it is
there. It waits for other processes through JAX's coordination service, which needs neither MPI nor
a program that runs on all devices.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from multimesh.checkpoint.handler import ShardHandler
from multimesh.checkpoint.names import Leaves, leaves_of

__all__ = ["Manager"]

_LONGEST_SAVE = 3600  # seconds that one process waits for the others to have written


class Manager:
    """The checkpoints of a folder: a state and a small JSON value for each step.

    Every rank makes the same calls, except where one says otherwise.

    Args:
      folder: An existing folder that all ranks see.
      keep: How many checkpoints to keep.
      asynchronous: Whether to write in the background.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool):
        processes = ocp.options.MultiprocessingOptions(
            # Named one by one, they meet without a program on all devices.
            active_processes=set(range(jax.process_count())),
            barrier_sync_key_prefix=str(folder),
        )
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(
                multiprocessing_options=processes,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, ShardHandler())
                ),
            ),
            "extra": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        }
        self._manager = ocp.CheckpointManager(
            folder,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=False,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=asynchronous,
                async_options=ocp.AsyncOptions(timeout_secs=_LONGEST_SAVE),
                multiprocessing_options=processes,
            ),
        )

    def latest(self) -> int | None:
        """The newest step of which a checkpoint is there or being written."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All such steps, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: Any) -> None:
        """Starts to save; returns when nothing of the state is read any more."""
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), extra=ocp.args.JsonSave(extra))
        self._manager.save(step, args=items, force=True)

    def leaves(self, step: int) -> Leaves | None:
        """The leaves of a saved state; None if there is none. Any rank may ask alone."""
        metadata = self._manager.item_metadata(step).get("state")
        return None if metadata is None else leaves_of(metadata.tree)

    def restore(self, step: int, state: Any) -> tuple[Any, Any]:
        """Reads a checkpoint.

        Args:
          step: One of `steps()`.
          state: A tree of arrays like the saved one, which gives the shardings.

        Returns:
          The state and the JSON value.
        """
        wanted = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            state,
        )
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(state, restore_args=wanted),
            extra=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        return restored.state, restored.extra

    def wait(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads."""
        self._manager.close()
