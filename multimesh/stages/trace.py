"""Traces a step with logical axes: the whole program once, as a jaxpr, on no device at all.

The trace runs under an abstract mesh that has every logical axis of the registered tasks, and
every axis of the user's mesh, all of size 1. Sharding constraints keep their logical names in it,
in the backward pass too.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn
from jax.extend import core
from jax.sharding import AbstractMesh

from multimesh._compat import jaxprs_in_params, unknown_axis
from multimesh.errors import UsageError

__all__ = ["is_tracing", "shapes", "trace"]


_tracing: ContextVar[bool] = ContextVar("multimesh tracing", default=False)


def is_tracing() -> bool:
    """Whether a program is being traced in which logical axis names have a meaning."""
    return _tracing.get()


def trace(function: Callable, args: Sequence, names: Sequence[str]) -> core.ClosedJaxpr:
    """Traces a function of pytrees.

    Args:
      function: Takes `args`; returns a pytree.
      args: Pytrees of `jax.ShapeDtypeStruct`.
      names: The logical axis names that are known.

    Returns:
      The jaxpr over the flattened arguments and results.

    Raises:
      UsageError: The model uses `shard_map`.
    """
    closed = _under_logical_axes(lambda: jax.make_jaxpr(function)(*args), names)
    if any("shard_map" in eqn.primitive.name for eqn in _all_equations(closed.jaxpr)):
        raise _shard_map_error("a shard_map equation")
    return closed


def shapes(function: Callable, args: Sequence, names: Sequence[str]) -> Any:
    """Like `jax.eval_shape`, for a function that names logical axes."""
    return _under_logical_axes(lambda: jax.eval_shape(function, *args), names)


def _under_logical_axes(run: Callable, names: Sequence[str]) -> Any:
    """Runs a trace; a logical name that nothing maps is added, and so replicated.

    The names that a callback maps are not known before the model's scopes are.
    """
    names = list(names)
    while True:
        try:
            with _logical_context(names):
                return run()
        except ValueError as exc:
            if "shard_map" in str(exc):
                raise _shard_map_error(str(exc)) from exc
            missing = unknown_axis(exc)
            if missing is None or missing in names:
                raise
            names.append(missing)


@contextlib.contextmanager
def _logical_context(names: Sequence[str]):
    """Makes logical axis names known to `with_sharding_constraint` and to Flax."""
    mesh = AbstractMesh((1,) * len(names), tuple(names))
    # Flax's own logical constraints trace to nothing without rules: each name stands for itself.
    rules = [(name, name) for name in names]
    token = _tracing.set(True)
    try:
        with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(rules):
            yield
    finally:
        _tracing.reset(token)


def _shard_map_error(detail: str) -> UsageError:
    return UsageError(
        "The model uses shard_map, which fixes devices before the step is cut into tasks "
        f"(got: {detail.splitlines()[0]}). Use with_sharding_constraint with logical axis names, "
        "or a plain function, inside the model."
    )


def _all_equations(jaxpr: core.Jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _all_equations(inner)
