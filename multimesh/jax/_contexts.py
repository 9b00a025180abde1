"""What a user may choose for the steps that are built in a `with` block.

They hold for what is built while the block is entered (`parallelize`, `parallelize_step`), and for
as long as that is used.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from multimesh.errors import UsageError
from multimesh.stages.options import DEFAULTS, Options
from multimesh.stages.registry import default_registry

__all__ = [
    "autoshard",
    "chosen_options",
    "context",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "ignore_transforms",
    "only_fuse_loop_tasks",
    "tasks",
]

logger = logging.getLogger("multimesh")

_chosen: ContextVar[Options] = ContextVar("multimesh options", default=DEFAULTS)


def chosen_options() -> Options:
    """What the blocks that are entered say."""
    return _chosen.get()


class Block(contextlib.ContextDecorator):
    """What a `with` statement enters, any number of times; or what decorates a function."""

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager]):
        self._enter = enter
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> None:
        entered = self._enter()
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._entered.pop().__exit__(*exc_info)


def _choose(switch: str, enabled: bool, **options: bool) -> Block:
    """A block in which some options are chosen; `switch` is what the user calls it."""
    if not isinstance(enabled, bool):
        raise UsageError(f"{switch}() is switched by True or False. Got {enabled!r}.")

    @contextlib.contextmanager
    def chosen() -> Iterator[None]:
        token = _chosen.set(replace(_chosen.get(), **options))
        try:
            yield
        finally:
            _chosen.reset(token)

    return Block(chosen)


def autoshard(enabled: bool = True) -> Block:
    """Spreads what has no annotation over the devices of its submesh.

    That is parameters, and batches of `parallelize`. Each is split along its first dimension that
    divides by the number of those devices. By default, what has no annotation is replicated.

    Args:
      enabled: Whether it is done.
    """
    return _choose("autoshard", enabled, autoshard=enabled)


def enable_task_fusion(enabled: bool = True) -> Block:
    """Lets registered tasks on one submesh become one program where they can, as is the default.

    Args:
      enabled: False: each registered task is a program of its own.
    """
    return _choose("enable_task_fusion", enabled, fusion=enabled)


def only_fuse_loop_tasks(enabled: bool = True) -> Block:
    """Lets registered tasks become one program in the microbatch loop only.

    Args:
      enabled: False: outside of it, too, as is the default.
    """
    return _choose("only_fuse_loop_tasks", enabled, fusion_outside=not enabled)


def enable_recomputation(enabled: bool = True) -> Block:
    """Computes what is cheap on each submesh that reads it, as is the default.

    Args:
      enabled: False: it is computed once, and sent.
    """
    return _choose("enable_recomputation", enabled, recomputation=enabled)


def enable_fast_path(enabled: bool = True) -> Block:
    """Has no meaning here, and says so: every step is a fixed list of instructions.

    Args:
      enabled: Ignored.
    """
    block = _choose("enable_fast_path", enabled)
    _say_that_no_path_is_slower()
    return block


@functools.cache  # once is enough
def _say_that_no_path_is_slower() -> None:
    logger.warning(
        "enable_fast_path() has no meaning in multimesh: every step is a list of instructions that "
        "was fixed when it was built; there is no slower path."
    )


def ignore_transforms(enabled: bool = True) -> Block:
    """Makes `parallelize` return what it is given, which then runs as plain JAX: for debugging.

    A step of `parallelize_step` becomes one program on all devices, as if there were no task.

    Args:
      enabled: Whether it is ignored.
    """
    return _choose("ignore_transforms", enabled, ignore_transforms=enabled)


def tasks(configure: Callable[[], Any]) -> Block:
    """Registers tasks for the duration of a block; those that were registered come back after it.

    Args:
      configure: Calls `register_task`.
    """
    if not callable(configure):
        raise UsageError(
            "tasks() needs a function that calls register_task, such as a def of your own. "
            f"Got {configure!r}."
        )

    @contextlib.contextmanager
    def registered() -> Iterator[None]:
        before = default_registry.entries[:]
        default_registry.entries.clear()
        try:
            configure()
            yield
        finally:
            default_registry.entries[:] = before

    return Block(registered)


def context(*contexts: contextlib.AbstractContextManager) -> Block:
    """Enters several contexts, in order.

    Args:
      *contexts: What `with` takes, such as `autoshard()` and `enable_task_fusion(False)`.
    """

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            yield

    return Block(entered)
