"""PRNG key arrays travel as the integers inside them."""

from collections.abc import Callable

import jax

from multimesh.transport.base import Layout

__all__ = ["data_layout", "is_key", "key_wrapper"]


def is_key(layout: Layout) -> bool:
    """Whether the value is an array of PRNG keys."""
    return jax.dtypes.issubdtype(layout.dtype, jax.dtypes.prng_key)


def data_layout(layout: Layout) -> Layout:
    """The layout of what travels: the value itself, or the integers of its keys.

    The integers of a key are further dimensions at the end, which no sharding splits.
    """
    if not is_key(layout):
        return layout
    keys = jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    data = jax.eval_shape(jax.random.key_data, keys)
    return Layout(data.shape, data.dtype, layout.sharding)


def key_wrapper(layout: Layout) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that makes keys, of the implementation in `layout`, of their integers."""
    found = []
    keys = jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), keys)
    return lambda data: jax.random.wrap_key_data(data, impl=found[0])
