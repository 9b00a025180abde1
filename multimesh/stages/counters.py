"""A counter that every microbatch advances by the same number needs no carry.

Before:                                         After:

    loop:   a  = add c 1      first stage           loop:   c  = add initial (mul number 2)
            c' = add a 1      last stage                    a  = add c 1
            with c' the next microbatch's c         after:  c' = add initial (2 * microbatches)

Counts of random numbers are such counters. Were they carried, the first stage would have to wait
with each microbatch until the last stage has drawn its numbers for the one before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.extend import core

from multimesh.stages.flat import (
    Atom,
    Carry,
    FlatStep,
    Node,
    is_literal,
    replace_atom,
    substitute,
)
from multimesh.stages.flatten import flatten

__all__ = ["count_by_number"]


def count_by_number(step: FlatStep, number: core.Var) -> FlatStep:
    """Computes counters from the number of the microbatch.

    Args:
      step: A flat step.
      number: The argument with the numbers of all microbatches, from 0.

    Returns:
      The step without the carries that are counters.
    """
    numbers = [entry.inner for entry in step.slices if entry.whole is number]
    definition = {var: node for node in step.loop for var in node.outputs}
    amounts = {carry: _amount(carry, definition) for carry in step.carries}
    counters = {carry: amount for carry, amount in amounts.items() if amount is not None}
    if not numbers or not counters:
        return step
    before: list[Node] = []
    after: list[Node] = []
    starts: dict[core.Var, Atom] = {}
    ends: dict[core.Var, Atom] = {}
    for carry, amount in counters.items():
        starts[carry.inner] = _emit(_advance(amount), [carry.initial, numbers[0]], before)
        total = amount * step.microbatches
        ends[carry.final] = _emit(_advance(total), [carry.initial], after)
    return replace(
        step,
        loop=[*before, *(substitute(node, starts) for node in step.loop)],
        after=[*after, *(substitute(node, ends) for node in step.after)],
        outputs=[replace_atom(atom, ends) for atom in step.outputs],
        carries=[carry for carry in step.carries if carry not in counters],
    )


def _amount(carry: Carry, definition) -> int | None:
    """What a microbatch adds to a carry; None where that is no fixed integer."""
    if carry.inner.aval.shape or not np.issubdtype(carry.inner.aval.dtype, np.integer):
        return None
    amount, var = 0, carry.update
    while var is not carry.inner:
        node = definition.get(var)
        if node is None or node.eqn.primitive.name != "add":
            return None
        literals = [atom for atom in node.eqn.invars if is_literal(atom)]
        if len(literals) != 1:
            return None
        amount += int(literals[0].val)
        (var,) = node.inputs
    return amount


def _advance(amount: int) -> Callable:
    def advance(initial, number=1):
        step = np.array(amount).astype(initial.dtype)  # wraps around, as adding does
        return initial + step * jax.numpy.asarray(number, initial.dtype)

    return advance


def _emit(function: Callable, atoms: Sequence[Atom], out: list[Node]) -> core.Var:
    """Appends the equations of a function of scalars; returns its result."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
    flat = flatten(jax.make_jaxpr(function)(*avals), lambda scope: None)
    known = dict(zip(flat.arguments, atoms, strict=True))
    out.extend(substitute(node, known) for node in flat.after)
    return flat.outputs[0]
