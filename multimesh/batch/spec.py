"""The structure of a batch, and its leaves as host arrays."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from multimesh.errors import BatchError
from multimesh.trees import difference

__all__ = ["BatchSpec"]


@dataclass(frozen=True)
class BatchSpec:
    """The structure of the batches that one rank gives.

    Attributes:
      tree: The pytree structure.
      names: A name of each leaf, for errors.
      shapes: The shape of each leaf, rows first.
      dtypes: The dtype of each leaf, as JAX canonicalises it.
      rows: How many rows there are.
    """

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    rows: int

    @classmethod
    def of(cls, batch: Any, argument: str) -> "BatchSpec":
        """Reads the structure of an example batch.

        Args:
          batch: A pytree of arrays; every leaf has the same number of rows.
          argument: The name of the argument, for errors.

        Raises:
          BatchError: There is no leaf, a leaf has no rows, or the leaves differ in rows.
        """
        paths, tree = jax.tree_util.tree_flatten_with_path(batch)
        names = tuple(argument + jax.tree_util.keystr(path) for path, _ in paths)
        if not paths:
            raise BatchError(f"{argument} must hold at least one array. Got {batch!r}.")
        leaves = [host_array(leaf, name) for name, (_, leaf) in zip(names, paths, strict=True)]
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.ndim == 0:
                raise BatchError(f"{name} has no rows: its shape is {leaf.shape}.")
        rows = {name: leaf.shape[0] for name, leaf in zip(names, leaves, strict=True)}
        if len(set(rows.values())) > 1:
            raise BatchError(
                "Every leaf of a batch must have the same number of rows (dimension 0). "
                f"Got {rows}."
            )
        return cls(
            tree,
            names,
            tuple(leaf.shape for leaf in leaves),
            tuple(jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves),
            leaves[0].shape[0],
        )

    def like(self, batch: Any) -> "BatchSpec":
        """Reads the structure of another batch, which may have other shapes than this one.

        Raises:
          BatchError: The tree, the number of dimensions or a dtype differs, or the leaves differ
            in rows; the message names the leaf.
        """
        leaves, tree = jax.tree.flatten(batch)
        if tree != self.tree:
            raise BatchError(
                "The batch must have the leaves of the example batch. "
                f"{difference(self.tree, batch)}"
            )
        shapes = []
        for leaf, name, shape, dtype in zip(
            leaves, self.names, self.shapes, self.dtypes, strict=True
        ):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                leaf = host_array(leaf, name)
            got = _dtype(leaf)
            if len(leaf.shape) != len(shape) or got != dtype:
                raise BatchError(
                    f"{name} must be {dtype} with {len(shape)} dimensions, as in the example "
                    f"batch. Got {got}{list(leaf.shape)}."
                )
            shapes.append(tuple(leaf.shape))
        rows = {shape[0] for shape in shapes}
        if len(rows) > 1 or 0 in rows:
            counts = dict(zip(self.names, (shape[0] for shape in shapes), strict=True))
            raise BatchError(
                "Every leaf of a batch must have the same number of rows (dimension 0), at least "
                f"one. Got {counts}."
            )
        return replace(self, shapes=tuple(shapes), rows=shapes[0][0])

    def flatten(self, batch: Any) -> list[np.ndarray]:
        """Returns the leaves of a batch of this structure as host arrays of its dtypes.

        Raises:
          BatchError: A leaf is no array of numbers, or lies on other processes.
        """
        return [
            host_array(leaf, name).astype(dtype, copy=False)
            for leaf, name, dtype in zip(
                jax.tree.leaves(batch), self.names, self.dtypes, strict=True
            )
        ]


def _dtype(leaf: Any) -> Any:
    """An array's dtype as JAX canonicalises it; a torch tensor's own dtype has no meaning to it."""
    dtype = leaf.dtype if isinstance(leaf, np.ndarray | jax.Array) else _as_numpy(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _as_numpy(leaf: Any) -> np.ndarray:
    try:
        return np.asarray(leaf)
    except TypeError:
        # A torch tensor of bfloat16, which NumPy by itself does not know.
        if not hasattr(leaf, "__dlpack__"):
            raise
        return np.asarray(jax.dlpack.from_dlpack(leaf))


def host_array(leaf: Any, name: str) -> np.ndarray:
    """Converts a batch leaf to NumPy.

    Raises:
      BatchError: The leaf is no array of numbers, or lies on other processes.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise BatchError(
            f"{name} is spread over several processes. Give host arrays (NumPy), or arrays of "
            "this process: multimesh places the batch itself."
        )
    try:
        array = _as_numpy(leaf)
    except Exception as exc:
        raise BatchError(f"{name} must be an array. Got {type(leaf).__name__}: {exc}") from exc
    if array.dtype == object or array.dtype.kind in "USM":
        raise BatchError(f"{name} must be an array of numbers. Got {array.dtype} ({leaf!r:.60}).")
    return array
