"""Splits a rematerialization that spans several tasks: each stage recomputes its own part.

The backward pass of a remat repeats the forward pass. Left as it is, what it recomputes would
cross submeshes a second time for every microbatch:

    forward:   a  = dot x w0    on stage 0        backward:  a' = dot x w0    on stage 0
               b  = dot a w1    on stage 1                   b' = dot a' w1   on stage 1

After this pass the equation of b' reads a, which stage 1 has received already. What stage 0 itself
reads of a' is recomputed there.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from multimesh.stages.flat import FlatStep, Node, is_literal, substitute

__all__ = ["split_rematerialization"]


def split_rematerialization(step: FlatStep) -> FlatStep:
    """Lets what is recomputed for another task be read from the forward pass.

    Args:
      step: A flat step; the equations of rematerializations that span tasks are marked.

    Returns:
      A step of the same meaning.
    """
    if not any(node.recomputed for node in step.loop):
        return step
    original: dict[Hashable, tuple[core.Var, ...]] = {}
    twins: dict[core.Var, core.Var] = {}  # recomputed value -> the same value of the forward pass
    makers: dict[core.Var, Node] = {}
    loop = []
    for node in step.loop:
        if not node.recomputed:
            original.setdefault(_key(node, twins), tuple(node.outputs))
        elif found := _unrounded(node, twins) or original.get(_key(node, twins)):
            twins.update(zip(node.outputs, found, strict=True))
            makers.update(dict.fromkeys(node.outputs, node))
        foreign = {var: twins[var] for var in node.inputs if _crosses(node, makers.get(var))}
        loop.append(substitute(node, foreign))
    return replace(step, loop=loop)


def _unrounded(node: Node, twins: dict[core.Var, core.Var]) -> tuple[core.Var, ...]:
    """What a rounding to its own precision leaves as it is: JAX marks saved values with one."""
    if node.eqn.primitive.name != "reduce_precision" or not twins.keys() & set(node.inputs):
        return ()
    (value,), params = node.inputs, node.eqn.params
    info = jnp.finfo(value.aval.dtype)
    same = (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)
    return (twins[value],) if same else ()


def _crosses(reader: Node, maker: Node | None) -> bool:
    """Whether a recomputed value is read outside of the task that recomputes it."""
    if maker is None:
        return False
    if reader.label is None or maker.label is None:
        return True
    return reader.label.task.mesh != maker.label.task.mesh


def _key(node: Node, twins: dict[core.Var, core.Var]) -> Hashable:
    """Equal for equations that compute the same."""
    inputs = tuple(_identity(atom, twins) for atom in node.eqn.invars)
    try:
        params = frozenset(node.eqn.params.items())
        hash(params)
    except TypeError:  # a parameter that cannot be compared: it is like no other
        return node
    return node.eqn.primitive, params, inputs


def _identity(atom: Any, twins: dict[core.Var, core.Var]) -> Hashable:
    if is_literal(atom):
        return str(atom.aval), str(atom.val)
    return twins.get(atom, atom)
