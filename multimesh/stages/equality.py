"""Whether two cuts of one step compute the same outside the loop.

Equations are compared, not numbers: the primitives, their parameters, literals and constants, from
the values that are asked for back to arguments and to what the loop hands out.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from multimesh.stages.flat import Atom, FlatStep, Node, is_literal

__all__ = ["computes_the_same"]


def computes_the_same(
    mine: FlatStep, theirs: FlatStep, values: Iterable[tuple[Atom, Atom]]
) -> bool:
    """Whether pairs of values of two steps are computed alike.

    Args:
      mine: A step.
      theirs: Another one.
      values: A value of each, of those that the loop does not compute.
    """
    my_nodes, their_nodes = _definitions(mine), _definitions(theirs)
    pairs = _Pairs()
    todo = list(values)
    while todo:
        my_value, their_value = todo.pop()
        if not pairs.are_new(my_value, their_value):
            if pairs.differ:
                return False
            continue
        my_node, their_node = my_nodes.get(my_value), their_nodes.get(their_value)
        if my_value in mine.constants or their_value in theirs.constants:
            if not _same(mine.constants.get(my_value), theirs.constants.get(their_value)):
                return False
        elif my_node is None or their_node is None:
            if my_node is not their_node:
                return False
        elif not _same_equation(my_node.eqn, their_node.eqn):
            return False
        else:
            todo += zip(my_node.eqn.invars, their_node.eqn.invars, strict=True)
    return True


class _Pairs:
    """Which variable of one program is which of another."""

    def __init__(self):
        self._known: dict[core.Var, core.Var] = {}
        self.differ = False

    def are_new(self, mine: Atom, theirs: Atom) -> bool:
        """Pairs two atoms; notes if they cannot be a pair.

        Returns:
          Whether they are variables of which nothing was known.
        """
        if is_literal(mine) or is_literal(theirs):
            self.differ |= not (
                is_literal(mine) and is_literal(theirs) and _same_literal(mine, theirs)
            )
            return False
        is_new = mine not in self._known
        self.differ |= self._known.setdefault(mine, theirs) is not theirs
        return is_new


def _definitions(step: FlatStep) -> dict[core.Var, Node]:
    return {var: node for node in (*step.before, *step.after) for var in node.outputs}


def _same_literal(mine, theirs) -> bool:
    return mine.aval == theirs.aval and _same(mine.val, theirs.val)


def _same_equation(mine: core.JaxprEqn, theirs: core.JaxprEqn) -> bool:
    """Whether two equations do the same, whatever they read."""
    return (
        mine.primitive is theirs.primitive
        and len(mine.invars) == len(theirs.invars)
        and [var.aval for var in mine.outvars] == [var.aval for var in theirs.outvars]
        and _same(mine.params, theirs.params)
    )


def _same_program(mine: core.Jaxpr, theirs: core.Jaxpr) -> bool:
    if len(mine.eqns) != len(theirs.eqns):
        return False
    pairs = _Pairs()
    atoms = [(mine.invars, theirs.invars), (mine.constvars, theirs.constvars)]
    for my_eqn, their_eqn in zip(mine.eqns, theirs.eqns, strict=True):
        if not _same_equation(my_eqn, their_eqn):
            return False
        atoms += (my_eqn.invars, their_eqn.invars), (my_eqn.outvars, their_eqn.outvars)
    for my_atoms, their_atoms in (*atoms, (mine.outvars, theirs.outvars)):
        if len(my_atoms) != len(their_atoms):
            return False
        for pair in zip(my_atoms, their_atoms, strict=True):
            pairs.are_new(*pair)
    return not pairs.differ


def _same(mine: Any, theirs: Any) -> bool:
    """Whether two parameters of equations, or two constants, are equal."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, core.ClosedJaxpr):
        return _same_program(mine.jaxpr, theirs.jaxpr) and _same(mine.consts, theirs.consts)
    if isinstance(mine, core.Jaxpr):
        return _same_program(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, np.ndarray | np.generic | jax.Array):
        return mine.dtype == theirs.dtype and _same_numbers(mine, theirs)
    # Functions are made anew by each trace; what they do is in the programs beside them.
    return callable(mine) or bool(mine == theirs) or _is_compared_by_identity(mine)


def _same_numbers(mine, theirs) -> bool:
    """Equal to the bit, so that NaN is NaN."""
    mine, theirs = (
        np.asarray(jax.random.key_data(each))
        if jax.dtypes.issubdtype(each.dtype, jax.dtypes.prng_key)
        else np.asarray(each)
        for each in (mine, theirs)
    )
    return mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()


def _is_compared_by_identity(value: Any) -> bool:
    return type(value).__eq__ is object.__eq__
