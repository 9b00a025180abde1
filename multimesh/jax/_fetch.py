"""Brings values that are spread over ranks to the host."""

from typing import Any

import jax
import numpy as np

from multimesh.errors import UsageError
from multimesh.transport import connect

__all__ = ["check_target", "fetch", "numbers"]


def fetch(tree: Any, to: int | str = "all") -> Any:
    """Copies a tree of arrays to host memory.

    Collective: under several ranks every rank makes the same call.

    Args:
      tree: A pytree; its `jax.Array`s may lie on any ranks. Other leaves are returned as they are.
      to: "all": every rank gets the values. A rank: only that one does.

    Returns:
      The tree with NumPy arrays (random keys: JAX arrays of this process); None on ranks that get
      nothing.

    Raises:
      UsageError: `to` is neither "all" nor a rank.
    """
    group, _ = connect()
    check_target(to, group.size)
    leaves, structure = jax.tree.flatten(tree)
    if group.size == 1:
        return jax.tree.unflatten(structure, [_host(leaf) for leaf in leaves])
    pieces = [_pieces(leaf) for leaf in leaves]
    everyone = (
        group.gather(pieces, "fetch", to)
        if isinstance(to, int)
        else group.allgather(pieces, "fetch")
    )
    if everyone is None:
        return None
    whole = [
        _assemble(leaf, [piece for rank in everyone for piece in rank[position]])
        for position, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, whole)


def check_target(to: Any, size: int) -> None:
    """Checks who is to get values.

    Raises:
      UsageError: `to` is neither "all" nor one of `size` ranks.
    """
    if to != "all" and (isinstance(to, bool) or to not in range(size)):
        raise UsageError(f'to must be "all" or a rank from 0 to {size - 1}. Got {to!r}.')


def _host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return _wrap(leaf, np.asarray(numbers(leaf)))


def _pieces(leaf: Any) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """The parts of an array that this rank is the first to hold."""
    if not isinstance(leaf, jax.Array):
        return []
    return [
        (shard.index, np.asarray(numbers(shard.data)))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _assemble(leaf: Any, pieces: list) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    example = pieces[0][1]
    whole = np.empty((*leaf.shape, *example.shape[leaf.ndim :]), example.dtype)
    for index, values in pieces:
        whole[index] = values
    return _wrap(leaf, whole)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def numbers(leaf: Any) -> Any:
    """Returns an array's numbers: itself, but for random keys their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _wrap(leaf: jax.Array, values: np.ndarray) -> Any:
    """NumPy has no keys: they come back as a JAX array of this process."""
    return (
        jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
        if _is_key(leaf)
        else values
    )
