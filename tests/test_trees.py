"""How pytrees differ, in words."""

import jax
import pytest

from multimesh.trees import difference


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        ({"a": 1, "b": (2, 3)}, {"a": 1}, "It lacks ['b'][0], ['b'][1]."),
        ({"a": 1}, {"a": 1, "b": 2}, "It should not have ['b']."),
        ({"a": 1}, {"b": 1}, "It lacks ['a']. It should not have ['b']."),
        ({"a": 1}, 1, "It lacks ['a']. It should not have a single array."),
        (
            [1],
            (1,),
            "are others: PyTreeDef((*,)).",
        ),
        (list(range(12)), [], "[5], [6], [7] and 2 more."),
    ],
)
def test_what_is_missing_and_what_is_too_much(expected, got, words):
    assert words in difference(jax.tree.structure(expected), got)


def test_the_structure_of_large_trees_is_cut():
    large = [(number,) for number in range(1000)]
    said = difference(jax.tree.structure([list(leaf) for leaf in large]), large)
    assert said.endswith("....")
    assert len(said) < 500
