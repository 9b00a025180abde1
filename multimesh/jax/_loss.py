"""Losses and metrics that mean the same with one microbatch and with many.

A loss over a batch is either a sum, or a sum divided by a weight (rows, or tokens that count).
Both parts are added up over microbatches and divided once: the mean of the microbatches' means is
another number as soon as their weights differ.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multimesh.errors import UsageError

__all__ = ["Parts", "Weighted", "as_parts", "finish", "is_weighted"]


class Weighted(NamedTuple):
    """A loss or metric that is `sum / weight` over the whole batch.

    Attributes:
      sum: Scalar: the sum of the terms that count, such as the masked sum of token losses.
      weight: Scalar: how much they count for, such as the number of tokens. It must not depend on
        the parameters.
    """

    sum: Any
    weight: Any


class Parts(NamedTuple):
    """What one microbatch adds to a value: `total`, and what to divide by (None: nothing)."""

    total: jax.Array
    weight: jax.Array | None


def is_weighted(value: Any) -> bool:
    """Whether a value is a `Weighted`, for `is_leaf=`."""
    return isinstance(value, Weighted)


def as_parts(value: Any, name: str, reduction: str | None, portions: float) -> Parts:
    """Takes a loss or metric of one microbatch apart.

    Args:
      value: A scalar or a `Weighted`.
      name: What it is, for errors.
      reduction: "mean", "sum" or None: what a scalar is over its rows.
      portions: The rows of the batch by the rows of the microbatch: with equal microbatches, their
        number.

    Returns:
      The parts, which are added up over microbatches.

    Raises:
      UsageError: The value is no scalar, or a scalar among several microbatches without a
        reduction.
    """
    if is_weighted(value):
        total, weight = _scalar(value.sum, f"{name}.sum"), _scalar(value.weight, f"{name}.weight")
        return Parts(total, weight.astype(jnp.promote_types(weight.dtype, jnp.float32)))
    value = _scalar(value, name)
    if portions == 1 or reduction == "sum":
        return Parts(value, None)
    if reduction is None:
        raise UsageError(
            "With several microbatches, a scalar does not say how to combine them. "
            f"The {name} is one: give reduction='mean' or reduction='sum', or return "
            "multimesh.jax.Weighted(sum, weight)."
        )
    # Its part of the mean over all rows: scaled here, gradients need no pass of their own.
    return Parts(value / portions, None)


def _scalar(value: Any, name: str) -> jax.Array:
    expected = f"The {name} must be a scalar or multimesh.jax.Weighted(sum, weight). "
    if isinstance(value, tuple):
        raise UsageError(
            f"{expected}Got a tuple of {len(value)}: give has_aux=True for (loss, metrics)."
        )
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{expected}Got {type(value).__name__}.") from exc
    if value.shape != ():
        raise UsageError(f"{expected}Got shape {value.shape}: take the mean or the sum over it.")
    if jnp.issubdtype(value.dtype, jnp.floating):  # sums of many in less would lose the last ones
        value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    return value


def finish(parts: Parts) -> jax.Array:
    """Divides the added-up parts."""
    return parts.total if parts.weight is None else operator.truediv(*parts)
