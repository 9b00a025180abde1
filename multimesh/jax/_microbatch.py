"""`microbatch`: a function over slices of one argument, its results summed."""

import functools
import logging
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax

from multimesh.errors import UsageError
from multimesh.jax._constraint import with_sharding_constraint
from multimesh.jax._loop import sum_over
from multimesh.schedule import SCHEDULES, custom_text

__all__ = ["microbatch"]

logger = logging.getLogger("multimesh")

_NOT_NEEDED = {
    "interleave": "stages that are visited several times are found in the program",
    "num_stages": "the stages are the registered tasks' submeshes",
    "unrolling": "the loop is never compiled as one, so there is nothing to unroll",
}


def microbatch(
    fun: Callable[..., Any],
    dim: int,
    size: int,
    argnum: int = 0,
    interleave: Any = None,
    num_stages: int | None = None,
    schedule: str | None = None,
    unrolling: Any = None,
    arg_shardings: Any = None,
    custom_schedule: Sequence[Sequence] | None = None,
) -> Callable[..., Any]:
    """Runs a function on slices of one argument, one after another, and adds up its results.

    Within `parallelize` the slices go through the stages as a pipeline. Elsewhere it runs as it is,
    a loop. To take a gradient, differentiate inside: `microbatch(jax.value_and_grad(loss), ...)`. A
    gradient of the whole is right too, but keeps every slice's activations, and is no pipeline.

    Args:
      fun: Its results are a pytree of arrays that can be added.
      dim: The dimension that is sliced.
      size: The length of a slice along it; it must divide the length of the argument.
      argnum: Which argument is sliced: a pytree, all of whose leaves are equally long along `dim`.
      interleave: Has no meaning here; a warning says so.
      num_stages: Likewise.
      schedule: "1f1b" (default), "gpipe", "wavefront", or "custom" with `custom_schedule`.
      unrolling: Has no meaning here; a warning says so.
      arg_shardings: How the slices are to lie: a `PartitionSpec` of logical names for each leaf of
        the argument, or one for all.
      custom_schedule: For each submesh, as the program comes to them, the order of its tasks: their
        names, or pairs (microbatch, name). Tasks are named as in `sharded_fun.plan.tasks` (F0, B0,
        F1B1), or by the registered name where one task alone has it. Every task stands there once
        for each microbatch.

    Returns:
      A function of the same arguments. With a single slice it is `fun` itself that runs.

    Raises:
      UsageError: An argument does not fit.
    """
    text = _schedule_text(schedule, custom_schedule)
    for name, value in (("dim", dim), ("size", size), ("argnum", argnum)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise UsageError(f"microbatch: {name} must be an integer. Got {value!r}.")
    if size < 1 or argnum < 0:
        raise UsageError(
            f"microbatch: size must be positive, and argnum the number of a positional argument. "
            f"Got size={size} and argnum={argnum}."
        )
    given = {"interleave": interleave, "num_stages": num_stages, "unrolling": unrolling}
    for name, value in given.items():
        if value is not None:
            logger.warning("microbatch(%s=%r) is ignored: %s.", name, value, _NOT_NEEDED[name])

    @functools.wraps(fun)
    def microbatched(*args: Any, **kwargs: Any) -> Any:
        if argnum >= len(args):
            raise UsageError(
                f"microbatch slices positional argument {argnum}. Got {len(args)} of them."
            )
        count = _count(args[argnum], dim, size)

        def on_slice(number: jax.Array) -> Any:
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * size, size, dim),
                args[argnum],
            )
            if arg_shardings is not None:
                part = with_sharding_constraint(part, arg_shardings)
            return fun(*args[:argnum], part, *args[argnum + 1 :], **kwargs)

        return fun(*args, **kwargs) if count == 1 else sum_over(on_slice, count, text)

    return microbatched


def _count(argument: Any, dim: int, size: int) -> int:
    """How many slices an argument has.

    Raises:
      UsageError: Its leaves are not equally long, or cannot be sliced so.
    """
    leaves = jax.tree_util.tree_leaves_with_path(argument)
    lengths = {}
    for path, leaf in leaves:
        shape = jax.numpy.shape(leaf)
        if not -len(shape) <= dim < len(shape):
            raise UsageError(
                f"microbatch slices dimension {dim}, which the leaf "
                f"{jax.tree_util.keystr(path) or 'itself'} of shape {shape} does not have."
            )
        lengths[jax.tree_util.keystr(path)] = shape[dim]
    if len(set(lengths.values())) != 1:
        raise UsageError(
            "microbatch needs leaves of one length along the dimension that it slices. "
            f"Got {lengths or 'no leaf'}."
        )
    length = next(iter(lengths.values()))
    if length % size or not length:
        raise UsageError(
            f"microbatch: size={size} must divide the length {length} along dimension {dim}."
        )
    return length // size


def _schedule_text(schedule: Any, custom: Any) -> str | None:
    if custom is not None and schedule not in (None, "custom"):
        raise UsageError(
            f'custom_schedule= goes with schedule="custom". Got schedule={schedule!r}.'
        )
    if schedule == "custom" and custom is None:
        raise UsageError('schedule="custom" needs custom_schedule=.')
    if custom is not None:
        return custom_text(custom)
    if schedule is not None and schedule not in SCHEDULES:
        names = ", ".join((*SCHEDULES, "custom"))
        raise UsageError(f"microbatch: schedule must be one of {names}. Got {schedule!r}.")
    return schedule
