"""Orbax's checkpoint manager on rank 0, and what the other ranks add to it.

Orbax writes in the background, renames a folder when all of it is there, and keeps the last ones.
It does so on rank 0 as in a job of one process. Its own way of running on several waits for every
process at every stage of a save; when one fails, the others would wait there for long.
"""

import contextlib
import functools
import uuid
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from multimesh.checkpoint.handler import ShardHandler
from multimesh.checkpoint.names import Leaves, leaves_of
from multimesh.checkpoint.parts import Part, wait_for_parts
from multimesh.checkpoint.shards import OwnShards
from multimesh.errors import RestoreError, SaveError
from multimesh.transport import Group

__all__ = ["Manager"]

_UNLIMITED = 10**6  # seconds


class Manager:
    """The checkpoints of a folder: a state and a small JSON value for each step.

    Args:
      folder: An existing folder that all ranks see.
      keep: How many checkpoints to keep.
      group: The ranks.
    """

    def __init__(self, folder: Path, keep: int, group: Group):
        self._folder = folder
        self._group = group
        self._step: int | None = None  # that is being saved
        self._begun: tuple[str, Path, list[str]] | None = None
        self._part: Part | None = None
        # Each rank is alone, as far as Orbax knows.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=group.rank,
            active_processes={group.rank},
            barrier_sync_key_prefix=f"{folder}:{group.rank}",
        )
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ShardHandler(self._begin))
        )
        self._handler = ocp.PyTreeCheckpointHandler(
            multiprocessing_options=alone, type_handler_registry=registry
        )
        self._orbax: Any = None  # on rank 0 only
        if group.rank == 0:
            self._orbax = ocp.CheckpointManager(
                folder,
                item_handlers={
                    "state": self._handler,
                    "extra": ocp.JsonCheckpointHandler(multiprocessing_options=alone),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    create=False,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(
                        timeout_secs=_UNLIMITED, create_directories_asynchronously=False
                    ),
                    multiprocessing_options=alone,
                ),
            )

    # ---------------------------------------------------------------- on rank 0

    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        self._orbax.reload()  # another object may have saved some
        return sorted(self._orbax.all_steps())

    def leaves(self, step: int) -> Leaves:
        """The leaves of a saved state.

        Raises:
          RestoreError: They cannot be read.
        """
        with self._reading(step):
            return leaves_of(self._orbax.item_metadata(step)["state"].tree)

    def extra(self, step: int) -> Any:
        """The JSON value of a checkpoint.

        Raises:
          RestoreError: It cannot be read.
        """
        items = ocp.args.Composite(extra=ocp.args.JsonRestore())
        with self._reading(step):
            return self._orbax.restore(step, args=items).extra

    # ---------------------------------------------------------------- on every rank

    def save(self, step: int, state: Any, extra: Any) -> None:
        """Starts to save; returns when nothing of the state is read any more. Collective.

        Raises:
          SaveError: It could not even begin.
        """
        problem = ""
        if self._orbax is not None:
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(state), extra=ocp.args.JsonSave(extra)
            )
            try:
                self._orbax.save(step, args=items, force=True)
            except OSError as error:
                problem = f"rank 0: {error}"
        self._begun, problem = self._group.broadcast((self._begun, problem), "save")
        if problem:
            raise _save_error(step, problem)
        self._step = step
        if self._orbax is None:
            mark, folder, names = self._begun
            own = map(OwnShards.of, jax.tree.leaves(state))
            self._part = Part(mark, dict(zip(names, own, strict=True)), folder)

    def _begin(self, folder: Path, names: list[str]):
        """Called by Orbax, on rank 0, within `save`."""
        mark = uuid.uuid4().hex
        self._begun = mark, folder, names
        return functools.partial(wait_for_parts, mark, range(1, self._group.size))

    def wait(self) -> None:
        """Waits until everything is written. Collective.

        Raises:
          SaveError: On every rank alike: a rank could not write.
        """
        if self._step is None:
            return
        problems = [problem for problem in self._group.allgather(self.finish(), "wait") if problem]
        step, self._step = self._step, None
        if problems:
            raise _save_error(step, problems[-1])

    def finish(self) -> str:
        """Waits until what this rank writes is written; returns what went wrong, or ""."""
        if self._part is not None:
            self._part.wait()
            return self._part.problem
        if self._orbax is not None:
            try:
                self._orbax.wait_until_finished()
            except Exception as error:
                return f"rank 0: {error}"
        return ""

    def restore(self, step: int, state: Any) -> Any:
        """Reads a state. Collective.

        Args:
          step: One of `steps()`.
          state: A tree of arrays like the saved one, which gives the shardings.

        Raises:
          RestoreError: On every rank alike: one could not read it.
        """
        problem, restored = None, None
        try:
            with self._reading(step):
                restored = self._read(step, state)
        except RestoreError as error:
            problem = error
        problems = [problem for problem in self._group.allgather(problem, "restore") if problem]
        if problems:
            raise problems[0]
        return restored

    def _read(self, step: int, state: Any) -> Any:
        wanted = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            state,
        )
        return self._handler.restore(
            self._folder / str(step) / "state",
            args=ocp.args.PyTreeRestore(state, restore_args=wanted),
        )

    @contextlib.contextmanager
    def _reading(self, step: int):
        """Makes one kind of error of all that a damaged file can raise."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise RestoreError(
                f"The checkpoint {self._folder / str(step)} cannot be read: it is damaged, or was "
                f"not written by Checkpoints.save. Restore another one. ({reason})"
            ) from error

    def close(self) -> None:
        """Ends the threads, which have nothing to do any more."""
        if self._orbax is not None:
            self._orbax.close()


def _save_error(step: int, problem: str) -> SaveError:
    return SaveError(
        f"The checkpoint of step {step} could not be written. {problem}. The earlier checkpoints "
        "are as they were."
    )
