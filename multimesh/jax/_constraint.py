"""Sharding constraints and `jit` with logical axis names."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from multimesh.errors import UsageError
from multimesh.stages.trace import is_tracing

__all__ = ["mjit", "with_sharding_constraint"]


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """`jax.lax.with_sharding_constraint` for a `PartitionSpec` of logical axis names.

    The logical names mean what `logical_axes` of the task says in which the constraint stands. A
    name that has no meaning there leaves its dimension whole: so the function also runs as it is,
    outside of any step.

    Args:
      x: A pytree of arrays.
      shardings: A `PartitionSpec` for all of it, or a tree of them that is a prefix of its tree;
        None leaves a part as it is. A `jax.sharding.Sharding` is passed on to JAX.

    Returns:
      The arrays.

    Raises:
      UsageError: A spec is for more dimensions than an array has.
    """
    if shardings is None:
        return x
    if isinstance(shardings, PartitionSpec | jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: _constrain(leaf, shardings), x)
    try:
        parts = jax.tree.map(_Part, shardings, x, is_leaf=_is_spec)
    except ValueError as exc:
        raise UsageError(
            "shardings must be a PartitionSpec, or a tree of them that is a prefix of the tree of "
            f"arrays. Got {shardings!r:.200} for {jax.tree.structure(x)!s:.200}."
        ) from exc
    return jax.tree.map(lambda part: _constrain_part(*part), parts, is_leaf=_is_part)


class _Part(NamedTuple):
    """A part of a tree of arrays, with the sharding that is meant for all of it."""

    spec: Any
    arrays: Any


def _is_part(part: Any) -> bool:
    return isinstance(part, _Part)


def _is_spec(part: Any) -> bool:
    return part is None or isinstance(part, PartitionSpec | jax.sharding.Sharding)


def _constrain_part(spec: Any, arrays: Any) -> Any:
    if not _is_spec(spec):
        raise UsageError(
            "A sharding must be a PartitionSpec of logical axis names, such as P('batch'), a "
            f"jax.sharding.Sharding, or None. Got {spec!r:.80}."
        )
    return with_sharding_constraint(arrays, spec)


def _constrain(leaf: Any, sharding: PartitionSpec | jax.sharding.Sharding) -> Any:
    if isinstance(sharding, PartitionSpec):
        if len(sharding) > jax.numpy.ndim(leaf):
            raise UsageError(
                f"{sharding} is for {len(sharding)} dimensions or more. Got an array of shape "
                f"{jax.numpy.shape(leaf)}."
            )
        if not is_tracing():
            sharding = _known(sharding)
            if not any(sharding):
                return leaf
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _known(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec whose names the mesh that is set has."""
    names = set(jax.sharding.get_abstract_mesh().axis_names)
    parts = []
    for entry in spec:
        wanted = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        kept = tuple(name for name in wanted if name in names)
        parts.append(kept or None)
    return PartitionSpec(*parts)


def mjit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.jit` whose shardings are `PartitionSpec`s of logical axis names.

    Args:
      fun: The function. Without one, what this returns decorates one.
      in_shardings: For its positional arguments, without static ones: a spec for all of them, or a
        tuple of one for each, in which a spec also stands for a tree. None: as they are.
      out_shardings: Likewise, for the results.
      **options: What else `jax.jit` takes, such as `static_argnums` and `donate_argnums`.

    Returns:
      The function. Outside of a step, logical names have no meaning, and it is a plain `jax.jit`.
    """
    if fun is None:
        return functools.partial(
            mjit, in_shardings=in_shardings, out_shardings=out_shardings, **options
        )
    static = _static_positions(fun, options)

    @functools.wraps(fun)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        fixed = {place + len(args) if place < 0 else place for place in static}
        traced = tuple(arg for place, arg in enumerate(args) if place not in fixed)
        if isinstance(in_shardings, tuple | list) and len(in_shardings) != len(traced):
            raise UsageError(
                "in_shardings must have a part for each positional argument that is not static, "
                f"{len(traced)} in this call. Got {len(in_shardings)}."
            )
        placed = iter(with_sharding_constraint(traced, _as_tuple(in_shardings)))
        args = tuple(arg if place in fixed else next(placed) for place, arg in enumerate(args))
        return with_sharding_constraint(fun(*args, **kwargs), out_shardings)

    return jax.jit(constrained, **options)


def _as_tuple(shardings: Any) -> Any:
    return tuple(shardings) if isinstance(shardings, list) else shardings


def _static_positions(fun: Callable[..., Any], options: dict[str, Any]) -> set[int]:
    """The positions of static arguments, by number or by name."""

    def several(value: Any) -> tuple:
        return (value,) if isinstance(value, int | str) else tuple(value or ())

    try:
        parameters = [*inspect.signature(fun).parameters.values()]
    except ValueError:  # a builtin that does not tell
        parameters = []
    names = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    named = {names.index(name) for name in several(options.get("static_argnames")) if name in names}
    return {*several(options.get("static_argnums")), *named}
