"""The microbatch loop of a step, in the form that `multimesh.stages.flatten` opens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from multimesh.stages.scopes import LOOP_SCOPE

__all__ = ["loop_over_microbatches", "microbatch_shapes"]


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


def _wide(dtype: Any) -> Any:
    """The dtype to add up in: many small terms vanish in 8 or 11 bits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype
