"""How pytrees differ, in words for errors."""

from collections.abc import Collection
from typing import Any

import jax

__all__ = ["difference", "list_names"]

_SHOWN = 10  # names of each kind, in an error
_LENGTH = 300  # characters of a tree whose names say nothing


def difference(expected: Any, got: Any) -> str:
    """Says how a tree differs from the structure that it should have.

    Args:
      expected: The structure (`jax.tree.structure`).
      got: The tree, of another structure.

    Returns:
      The leaves that it lacks and those that it has beside them. If there are none, the start of
      its structure.
    """
    wanted = _names(jax.tree.unflatten(expected, range(expected.num_leaves)))
    found = _names(got)
    parts = {"It lacks": wanted - found, "It should not have": found - wanted}
    words = [f"{title} {list_names(names)}." for title, names in parts.items() if names]
    if words:
        return " ".join(words)
    structure = str(jax.tree.structure(got))
    cut = f"{structure[:_LENGTH]}..." if len(structure) > _LENGTH else structure
    return (
        "Its leaves have the right names, but its containers, or what they hold beside leaves (a "
        f"model, an optimizer), are others: {cut}."
    )


def list_names(names: Collection[str]) -> str:
    """Lists names in their order, many by their number."""
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _names(tree: Any) -> set[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "a single array" for path, _ in paths}
