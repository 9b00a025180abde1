"""The leaves of a state and of a checkpoint by name, and how they differ."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from multimesh.transport import Layout
from multimesh.transport.keys import data_layout
from multimesh.trees import list_names

__all__ = ["Leaves", "differences", "leaves_of"]

# What is stored of each leaf, such as {"params.dense.kernel": "float32[8,16]"}.
Leaves = Mapping[str, str]


def leaves_of(tree: Any) -> Leaves:
    """Describes the leaves of a tree.

    Args:
      tree: A pytree of arrays, or of what has their shapes and dtypes. Random keys are described
        as the integers that are stored for them.

    Returns:
      Name to dtype and shape. A name is the same whether a node is an object, a dict or a tuple.
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _describe(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def differences(wanted: Leaves, stored: Leaves) -> str:
    """Says how a checkpoint differs from a state.

    Returns:
      Three lists of names in words, for an error; empty if nothing differs.
    """
    changed = [
        f"{name} ({stored[name]}, not {wanted[name]})"
        for name in wanted.keys() & stored.keys()
        if stored[name] != wanted[name]
    ]
    parts = {
        "The checkpoint lacks": wanted.keys() - stored.keys(),
        "The state lacks": stored.keys() - wanted.keys(),
        "The checkpoint differs in": changed,
    }
    return " ".join(f"{title} {list_names(names)}." for title, names in parts.items() if names)


def _describe(leaf: Any) -> str:
    data = data_layout(Layout(tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None)))
    return f"{np.dtype(data.dtype).name}[{','.join(map(str, data.shape))}]"
