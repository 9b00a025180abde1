"""What a user may choose for the steps that are built in a `with` block.

They hold for what is built while the block is entered (`parallelize`, `parallelize_step`), and for
as long as that is used.
"""

import contextlib
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


@contextlib.contextmanager
def _choose(**options: Any) -> Iterator[None]:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise UsageError(f"A context is switched by True or False. Got {name}={value!r}.")
    token = _chosen.set(replace(_chosen.get(), **options))
    try:
        yield
    finally:
        _chosen.reset(token)


def autoshard(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Spreads what has no annotation over the devices of its submesh.

    That is parameters, and batches of `parallelize`. Each is split along its first dimension that
    divides by the number of those devices. By default, what has no annotation is replicated.

    Args:
      enabled: Whether it is done.
    """
    return _choose(autoshard=enabled)


def enable_task_fusion(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Lets registered tasks on one submesh become one program where they can, as is the default.

    Args:
      enabled: False: each registered task is a program of its own.
    """
    return _choose(fusion=enabled)


def only_fuse_loop_tasks(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Lets registered tasks become one program in the microbatch loop only.

    Args:
      enabled: False: outside of it, too, as is the default.
    """
    return _choose(fusion_outside=not enabled)


def enable_recomputation(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Computes what is cheap on each submesh that reads it, as is the default.

    Args:
      enabled: False: it is computed once, and sent.
    """
    return _choose(recomputation=enabled)


@contextlib.contextmanager
def enable_fast_path(enabled: bool = True) -> Iterator[None]:
    """Has no meaning here, and says so: every step is a fixed list of instructions.

    Args:
      enabled: Ignored.
    """
    logger.warning(
        "enable_fast_path(%r) has no meaning in multimesh: every step is a list of instructions "
        "that was fixed when it was built; there is no slower path.",
        enabled,
    )
    yield


def ignore_transforms(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Makes `parallelize` return what it is given, which then runs as plain JAX: for debugging.

    A step of `parallelize_step` becomes one program on all devices, as if there were no task.

    Args:
      enabled: Whether it is ignored.
    """
    return _choose(ignore_transforms=enabled)


@contextlib.contextmanager
def tasks(configure: Callable[[], Any]) -> Iterator[None]:
    """Registers tasks for the duration of a block; those that were registered come back after it.

    Args:
      configure: Calls `register_task`.
    """
    if not callable(configure):
        raise UsageError(
            "tasks() needs a function that calls register_task, such as a def of your own. "
            f"Got {configure!r}."
        )
    before = default_registry.entries[:]
    default_registry.entries.clear()
    try:
        configure()
        yield
    finally:
        default_registry.entries[:] = before


@contextlib.contextmanager
def context(*contexts: contextlib.AbstractContextManager) -> Iterator[None]:
    """Enters several contexts, in order.

    Args:
      *contexts: What `with` takes, such as `autoshard()` and `enable_task_fusion(False)`.
    """
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
