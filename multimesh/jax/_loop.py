"""The microbatch loop of a step, in the form that `multimesh.stages.flatten` opens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from multimesh.stages.scopes import LOOP_SCOPE

__all__ = ["microbatch_shapes", "sum_over_microbatches"]


def microbatch_shapes(batch: Any) -> Any:
    """Returns the shapes of one microbatch of a stacked batch."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def sum_over_microbatches(
    function: Callable[[Any], tuple[Any, Any]], batch: Any
) -> tuple[Any, Any]:
    """Runs a function on each microbatch, adding up one part of its result.

    Args:
      function: From a microbatch to `(summed, stacked)`, pytrees of arrays.
      batch: A pytree of arrays `(microbatches, rows, ...)`.

    Returns:
      The sum of `summed` over microbatches, and `stacked` with the microbatches in front.
    """
    shapes, _ = jax.eval_shape(function, microbatch_shapes(batch))
    with jax.named_scope(LOOP_SCOPE):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def body(carry, microbatch):
            summed, stacked = function(microbatch)
            return jax.tree.map(jnp.add, carry, summed), stacked

        return jax.lax.scan(body, zeros, batch)
