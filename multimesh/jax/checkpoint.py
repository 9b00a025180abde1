"""Saves and restores the training state, from any layout of stages and ranks into any other.

A module of its own: Orbax takes a while to import.
"""

import json
import operator
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from multimesh.checkpoint import Leaves, Manager, differences, leaves_of
from multimesh.errors import RestoreError, StallError, UsageError
from multimesh.fingerprint import compare
from multimesh.launch import require_init
from multimesh.transport import Group, connect

__all__ = ["Checkpoints"]

_Result = TypeVar("_Result")


class Checkpoints:
    """The checkpoints of a folder.

    Each is an ordinary Orbax checkpoint, `FOLDER/STEP/state`, in which every leaf is written once.
    It can be restored on another number of ranks, stages and devices, and by Orbax alone. It
    appears under its name when all of it is written: a job that dies meanwhile leaves the earlier
    ones as they were, and the next that opens the folder removes what is unfinished.

    Every rank makes the same calls. Use it in a `with` statement, which waits at its end for a save
    that is still being written.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3, asynchronous: bool = True):
        """Opens a folder, and makes it if there is none. Collective.

        Args:
          folder: Where to save; the same on every rank, on a disk that all see. No other job may
            write there at the same time.
          keep: How many checkpoints to keep: the newest ones.
          asynchronous: Whether `save` returns when the state is copied to host memory, and writes
            in the background.

        Raises:
          UsageError: The folder cannot be written to or is not shared by all ranks, or `keep` is
            no positive integer.
          RankMismatchError: The ranks gave different arguments.
        """
        require_init()
        self._group, _ = connect()
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep must be a positive integer. Got {keep!r}.")
        if not isinstance(asynchronous, bool):
            raise UsageError(f"asynchronous must be True or False. Got {asynchronous!r}.")
        self._folder = _as_path(folder)
        options = {"folder": str(self._folder), "keep": str(keep), "mode": str(asynchronous)}
        compare(self._group, options, "Give every rank the same arguments.")
        _check_folder(self._group, self._folder)
        self._manager = Manager(self._folder, keep, self._group)
        self._asynchronous = asynchronous
        self._is_closed = False

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None if there is none. Collective.

        Waits for a save that is being written.

        Raises:
          SaveError: That could not be written.
        """
        self.wait()
        return _on_first_rank(self._group, lambda: max(self._manager.steps(), default=None))

    def save(self, step: int, state: Any, extra: Any = None) -> None:
        """Saves a state. Collective.

        Args:
          step: Its number, larger than those that are there.
          state: A pytree of arrays, such as the state of `parallelize_step`. A later step may
            overwrite it.
          extra: A small value that JSON can hold, such as where in the data the next step starts.

        Raises:
          UsageError: There is a checkpoint of that step or of a later one, a leaf cannot be saved,
            or `extra` is not JSON.
          RankMismatchError: The ranks gave different things.
          SaveError: This or the save before could not be written.
        """
        self.wait()
        text = _as_json(extra)
        given = {"step": repr(step), "extra": text, **_check_leaves(state), **_places_of(state)}
        _check_numbers(state)
        compare(self._group, given, "Give every rank the same arguments.")
        number = _as_step(step)
        _on_first_rank(self._group, lambda: self._check_step(number))
        self._manager.save(number, state, {"extra": json.loads(text)})
        if not self._asynchronous:
            self.wait()

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, Any]:
        """Reads a checkpoint. Collective.

        Args:
          state: A state with the same tree, shapes and dtypes, such as `parallelize_step` returns.
            It says where each leaf is to lie. Its numbers are not used: it may be one that a step
            has overwritten.
          step: Which checkpoint; None for the newest.

        Returns:
          The restored state, and the `extra` that it was saved with.

        Raises:
          UsageError: There is no such checkpoint, or its leaves are not those of `state`; the
            message names those that differ. Nothing has been read then.
          RestoreError: On every rank: the checkpoint is damaged.
        """
        self.wait()
        wanted = _check_leaves(state)
        step = _on_first_rank(self._group, lambda: self._check_stored(wanted, step))
        extra = _on_first_rank(self._group, lambda: self._manager.extra(step))
        return self._manager.restore(step, state), extra["extra"]

    def wait(self) -> None:
        """Waits until the last save is written by all ranks. Collective.

        Raises:
          SaveError: On every rank: one could not write its part. The earlier checkpoints are as
            they were, and saving can go on.
          UsageError: The `with` statement has ended.
        """
        if self._is_closed:
            raise UsageError(
                f"Checkpoints({str(self._folder)!r}) was closed at the end of its `with` "
                "statement. Open the folder anew."
            )
        self._manager.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, StallError):
            return  # another rank will never write its part
        try:
            if error is None:
                self.wait()
            else:
                self._manager.finish()  # the other ranks may not come to where all wait
        finally:
            self._is_closed = True
            self._manager.close()

    def _check_step(self, step: int) -> None:
        latest = max(self._manager.steps(), default=-1)
        if step <= latest:
            raise UsageError(
                f"step must be larger than {latest}, the newest checkpoint in {self._folder}. "
                f"Got {step}. To start again from an earlier step, save to another folder or "
                "remove the later checkpoints first."
            )

    def _check_stored(self, wanted: Leaves, step: int | None) -> int:
        """Checks that a checkpoint fits; returns its step."""
        steps = self._manager.steps()
        if not steps:
            raise UsageError(f"There is no checkpoint in {self._folder}.")
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise UsageError(
                f"step must be one of the checkpoints in {self._folder}: {steps}. Got {step!r}."
            )
        place = self._folder / str(chosen)
        problem = differences(wanted, self._manager.leaves(chosen))
        if problem:
            raise UsageError(
                f"The checkpoint {place} is one of another model or optimizer. {problem} Build "
                "the step with the model and the optimizer that were saved."
            )
        return chosen


def _on_first_rank(group: Group, function: Callable[[], _Result]) -> _Result:
    """Calls a function on rank 0; what it returns, or its error, is the same on every rank."""
    result, problem = None, None
    if group.rank == 0:
        try:
            result = function()
        except (UsageError, RestoreError) as error:
            problem = error
    result, problem = group.broadcast((result, problem), "Checkpoints")
    if problem is not None:
        raise problem
    return result


def _as_path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or "://" in os.fspath(folder):
        raise UsageError(
            "folder must be a path on a disk that all ranks see, not the address of a store. "
            f"Got {folder!r}."
        )
    return Path(folder).absolute()


def _check_folder(group: Group, folder: Path) -> None:
    """Checks that rank 0 can write to a folder and all ranks see what it writes."""
    probe = f".{uuid.uuid4().hex}.probe"

    def write():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / probe).touch()
        except OSError as error:
            raise UsageError(f"The folder {folder} cannot be written to: {error}") from error
        return folder / probe

    written = _on_first_rank(group, write)
    blind = [
        rank
        for rank, seen in enumerate(group.allgather(written.exists(), "Checkpoints"))
        if not seen
    ]
    if group.rank == 0:
        written.unlink()
    if blind:
        raise UsageError(
            f"Every rank must see {folder}, but what rank 0 writes there is not visible on ranks "
            f"{blind}. Use a folder on a disk that all hosts share."
        )


def _check_leaves(state: Any) -> Leaves:
    """Checks that a state's leaves are arrays, and describes them."""
    if not jax.tree.leaves(state):
        raise UsageError(f"The state must hold at least one array. Got {state!r:.60}.")
    for name, leaf in _named_leaves(state):
        if not isinstance(leaf, jax.Array):
            raise UsageError(
                f"The state leaf {name} must be a jax.Array. Got {type(leaf).__name__}."
            )
    return leaves_of(state)


def _check_numbers(state: Any) -> None:
    """Checks that there is something to save of each leaf."""
    for name, leaf in _named_leaves(state):
        if leaf.is_deleted():
            raise UsageError(
                f"The state leaf {name} was donated to a step. Save the state that it returned."
            )
        if leaf.size == 0:
            raise UsageError(
                f"The state leaf {name} must have entries: Orbax does not save the empty. "
                f"Got the shape {leaf.shape}."
            )


def _named_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        yield jax.tree_util.keystr(path), leaf


def _places_of(state: Any) -> Mapping[str, str]:
    """Where each leaf lies. An array that each rank has for itself lies elsewhere on each."""
    places = {}
    for name, leaf in _named_leaves(state):
        ids = [device.id for device in leaf.sharding.device_set]
        places[f"devices of the state leaf {name}"] = f"{len(ids)}, the first of them {min(ids)}"
    return places


def _as_step(step: Any) -> int:
    try:
        number = int(step) if isinstance(step, jax.Array) else operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or number < 0:
        raise UsageError(f"step must be an integer from 0 on. Got {step!r}.")
    return number


def _as_json(extra: Any) -> str:
    try:
        return json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"extra must be a value that JSON can hold: finite numbers, strings, lists, dicts. "
            f"{error}"
        ) from error
