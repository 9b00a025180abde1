"""The microbatch loop of a step, in the form that `multimesh.stages.flatten` opens."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from multimesh.stages.scopes import LOOP_SCOPE, SCHEDULE_SCOPE

__all__ = ["loop_over_microbatches", "microbatch_shapes", "sum_over"]


def microbatch_shapes(batch: Any) -> Any:
    """Returns the shapes of one microbatch of a stacked batch."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def loop_over_microbatches(
    function: Callable[[Any, Any, jax.Array], tuple[Any, Any, Any]],
    carried: Any,
    batch: Any,
    numbers: jax.Array,
) -> tuple[Any, Any, Any]:
    """Runs a function on each microbatch, adding up one part of its result.

    Args:
      function: From `(carried, microbatch, number)` to `(summed, stacked, carried)`, pytrees of
        arrays.
      carried: What the first microbatch gets from the one before.
      batch: A pytree of arrays `(microbatches, rows, ...)`.
      numbers: int32 `(microbatches,)`: the number of each microbatch.

    Returns:
      The sum of `summed` over microbatches, in float32 where it has less; `stacked` with the
      microbatches in front; and what the last microbatch hands on.
    """
    number = jax.ShapeDtypeStruct((), numbers.dtype)
    shapes, _, _ = jax.eval_shape(function, carried, microbatch_shapes(batch), number)
    with jax.named_scope(LOOP_SCOPE):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf.dtype)), shapes)

        def body(carry, microbatch):
            sums, carried = carry
            summed, stacked, carried = function(carried, *microbatch)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, summed)
            return (sums, carried), stacked

        (sums, carried), stacked = jax.lax.scan(body, (zeros, carried), (batch, numbers))
    return sums, stacked, carried


def sum_over(function: Callable[[jax.Array], Any], count: int, schedule: str | None = None) -> Any:
    """Adds up a function of the number of a microbatch.

    Args:
      function: From an int32 scalar to a pytree of arrays; it slices its microbatch by itself.
      count: How many microbatches there are.
      schedule: The name of the schedule that the loop asks for.

    Returns:
      The sum, in the dtypes of the function's results.
    """

    def one(carried, _, number):
        return jax.tree.map(jnp.asarray, function(number)), (), carried

    wish = jax.named_scope(f"{SCHEDULE_SCOPE}{schedule}") if schedule else nullcontext()
    shapes = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    with wish:
        sums, _, _ = loop_over_microbatches(one, (), (), jax.lax.iota(jnp.int32, count))
    return jax.tree.map(lambda total, like: total.astype(like.dtype), sums, shapes)


def _wide(dtype: Any) -> Any:
    """The dtype to add up in: many small terms vanish in 8 or 11 bits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype
