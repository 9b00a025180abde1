"""Splits an accumulator that several submeshes feed into one for each.

Before, for a parameter that two stages read:        After:

    loop:   g  = add_any ga gb                        loop:   ca' = add ca ga      on a's submesh
            c' = add c g                                      cb' = add cb gb      on b's submesh
                                                      after:  total = add ca' cb'  once a step

Without this pass a gradient as large as the parameter would cross for every microbatch.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from jax.extend import core

from multimesh._compat import new_variable
from multimesh.stages.flat import Atom, Carry, FlatStep, Node, is_literal
from multimesh.stages.placement import Placement

__all__ = ["split_accumulators"]

# A summand, and the linear equations to apply to it, innermost first.
Term = tuple[Atom, list[Node]]

_ADD = {"add", "add_any"}
# Linear in their one operand: f(a + b) = f(a) + f(b).
_LINEAR = {"convert_element_type", "transpose", "reshape", "neg", "squeeze", "sharding_constraint"}


def split_accumulators(step: FlatStep, placement: Placement) -> FlatStep:
    """Gives each submesh that feeds an accumulator one of its own.

    Args:
      step: The flat step.
      placement: The places of the loop; those of the new equations are added.

    Returns:
      The step with split accumulators.
    """
    splitter = _Splitter(step, placement)
    for carry in step.carries:
        splitter.visit(carry)
    step = replace(
        step,
        loop=[node for node in splitter.loop if node not in splitter.dropped],
        carries=splitter.carries,
        after=[*splitter.joins, *step.after],
    )
    return _without_unread(step)


class _Splitter:
    def __init__(self, step: FlatStep, placement: Placement):
        self.placement = placement
        self.loop = list(step.loop)
        self.carries: list[Carry] = []
        self.joins: list[Node] = []
        self.dropped: set[Node] = set()
        self.definition = {var: node for node in step.loop for var in node.outputs}
        self.outer = {var: node for node in step.before for var in node.outputs}
        self.uses: dict[core.Var, int] = {}
        for node in step.loop:
            for var in node.inputs:
                self.uses[var] = self.uses.get(var, 0) + 1
        for atom in (*(c.update for c in step.carries), *(s.inner for s in step.stacked)):
            self.uses[atom] = self.uses.get(atom, 0) + 1

    def visit(self, carry: Carry) -> None:
        node = self.definition.get(carry.update)
        if node is None or node.eqn.primitive.name not in _ADD or not self._private(carry, node):
            self.carries.append(carry)
            return
        (added,) = (atom for atom in node.eqn.invars if atom is not carry.inner)
        groups: dict[int, list[Term]] = defaultdict(list)
        invariant: list[Term] = []
        for term in self._terms(added, []):
            place = self.placement.values.get(term[0])
            (invariant if place is None else groups[place]).append(term)
        if len(groups) < 2 or not self._starts_at_zero(carry):
            self.carries.append(carry)
            return
        owner = min(groups, key=lambda place: min(self._stage(term) for term, _ in groups[place]))
        groups[owner].extend(invariant)
        self._split(carry, node, groups, owner)

    def _stage(self, term: Atom) -> int:
        return self.placement.stage.get(term, 0)

    def _starts_at_zero(self, carry: Carry) -> bool:
        node = self.outer.get(carry.initial)
        if node is None or node.eqn.primitive.name not in ("broadcast_in_dim", "copy"):
            return False
        if node.inputs:
            return False
        return not np.any(node.eqn.invars[0].val)

    def _private(self, carry: Carry, node: Node) -> bool:
        """Whether the carry is nothing but this sum."""
        operands = node.eqn.invars
        return (
            sum(atom is carry.inner for atom in operands) == 1
            and self.uses.get(carry.inner, 0) == 1
            and self.uses[carry.update] == 1
            and not any(is_literal(atom) for atom in operands)
        )

    def _terms(self, atom: Atom, chain: list[Node]) -> list[Term]:
        """The summands of a value."""
        node = self.definition.get(atom)
        if node is None or self.uses[atom] != 1:
            return [(atom, chain)]
        if node.eqn.primitive.name in _ADD and len(node.inputs) == 2:
            return [term for operand in node.eqn.invars for term in self._terms(operand, chain)]
        if node.eqn.primitive.name in _LINEAR:
            below = self._terms(node.eqn.invars[0], [node, *chain])
            return below if len(below) > 1 else [(atom, chain)]
        return [(atom, chain)]

    def _split(self, carry: Carry, node: Node, groups, owner: int) -> None:
        total: Atom = None
        for submesh in sorted(groups, key=lambda place: place != owner):
            final = self._accumulate(carry, node, groups[submesh], submesh)
            total = final if total is None else self._join(node, total, final, owner)
        # The last join defines the value that the rest of the step knows.
        last = self.joins.pop()
        renamed = replace(last, eqn=last.eqn.replace(outvars=[carry.final]))
        self.placement.joins.add(renamed)
        self.placement.put(renamed, owner)
        self.joins.append(renamed)
        self.dropped.add(node)

    def _accumulate(self, carry: Carry, node: Node, terms, submesh: int) -> core.Var:
        stage = max(self._stage(term) for term, _ in terms)
        total: Atom = None
        for term, chain in terms:
            value = term
            for linear in chain:
                value = self._emit(linear, [value, *linear.eqn.invars[1:]], submesh, stage)
            total = value if total is None else self._emit(node, [total, value], submesh, stage)
        inner, final = new_variable(carry.inner.aval), new_variable(carry.final.aval)
        update = self._emit(node, [inner, total], submesh, stage)
        self.carries.append(Carry(inner, carry.initial, update, final))
        self.placement.values[inner] = self.placement.values[final] = submesh
        return final

    def _emit(self, like: Node, invars, submesh: int, stage: int) -> core.Var:
        out = new_variable(like.outputs[0].aval)
        node = replace(like, eqn=like.eqn.replace(invars=list(invars), outvars=[out]), label=None)
        self.placement.put(node, submesh, stage)
        self.placement.backward.add(out)
        self.loop.append(node)
        return out

    def _join(self, like: Node, left: Atom, right: Atom, submesh: int) -> core.Var:
        out = new_variable(like.outputs[0].aval)
        node = replace(like, eqn=like.eqn.replace(invars=[left, right], outvars=[out]), label=None)
        self.placement.put(node, submesh)
        self.placement.joins.add(node)
        self.joins.append(node)
        return out


def _without_unread(step: FlatStep) -> FlatStep:
    """Drops loop equations whose results nothing reads any more."""
    needed = {carry.update for carry in step.carries} | {entry.inner for entry in step.stacked}
    needed |= {var for node in step.after for var in node.inputs} | set(step.outputs)
    kept = []
    for node in reversed(step.loop):
        if any(var in needed for var in node.outputs) or node.eqn.effects:
            needed.update(node.inputs)
            kept.append(node)
    return replace(step, loop=kept[::-1])
