"""Opens a traced step: one flat list of equations before, in and after the microbatch loop.

Before (schematically):                          After:

    g0 = broadcast 0.0                           before:  g0 = broadcast 0.0
    g, = scan[{ lambda w c x .                   loop:    c, x given for each microbatch
          y = jit[{...}] x w                              a = dot x w      layer_0
          c' = add c y  } ] w g0 xs                       c' = add c a
    w' = sub w g                                 after:   w' = sub w g     with g the last c'

Calls (`jit`) are inlined, and each equation gets the label that its scope has in the registry.
The pass is pure: it makes new variables throughout and changes nothing that it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from multimesh._compat import equation_scope_text, jaxprs_in_params, new_variable
from multimesh.errors import PlacementError
from multimesh.stages.registry import Label
from multimesh.stages.scopes import LOOP_SCOPE, Scope, parse_scope

__all__ = ["Carry", "FlatStep", "Node", "Slice", "Stacked", "flatten", "is_literal", "nbytes"]

Atom = Any  # core.Var | core.Literal
Labeler = Callable[[Scope], Label | None]


@dataclass(frozen=True, eq=False)
class Node:
    """An equation with what its scope says.

    Attributes:
      eqn: The equation; its variables are unique in the step.
      scope: Where it comes from.
      label: The task of that scope, if any.
      recomputed: Whether it belongs to the backward pass of a remat that spans several tasks.
    """

    eqn: core.JaxprEqn
    scope: Scope
    label: Label | None
    recomputed: bool = False

    @property
    def inputs(self) -> list[core.Var]:
        """The variables that the equation reads, without literals."""
        return [atom for atom in self.eqn.invars if not is_literal(atom)]

    @property
    def outputs(self) -> list[core.Var]:
        """The variables that the equation defines."""
        return list(self.eqn.outvars)


@dataclass(frozen=True)
class Carry:
    """A value that the loop hands from one microbatch to the next."""

    inner: core.Var
    initial: core.Var
    update: core.Var
    final: core.Var


@dataclass(frozen=True)
class Slice:
    """A value that the loop reads one slice of for each microbatch; `whole` is a step argument."""

    inner: core.Var
    whole: Atom


@dataclass(frozen=True)
class Stacked:
    """A value of every microbatch that the step returns; `whole` has them stacked."""

    inner: core.Var
    whole: core.Var


@dataclass
class FlatStep:
    """A step with calls inlined and the microbatch loop opened.

    Attributes:
      arguments: The step's inputs.
      outputs: The step's results.
      constants: Arrays that the traced function closed over.
      before: Equations that the loop waits for.
      loop: Equations of one microbatch.
      after: The other equations.
      carries, slices, stacked: What enters and leaves the loop.
      microbatches: How often the loop runs.
      constraints: The first sharding constraint on each argument: a logical PartitionSpec and the
        label of the equation.
    """

    arguments: list[core.Var]
    outputs: list[core.Var] = field(default_factory=list)
    constants: dict[core.Var, Any] = field(default_factory=dict)
    before: list[Node] = field(default_factory=list)
    loop: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    stacked: list[Stacked] = field(default_factory=list)
    microbatches: int = 1
    constraints: dict[core.Var, tuple[Any, Label | None]] = field(default_factory=dict)


def is_literal(atom: Atom) -> bool:
    """Whether an atom is a literal rather than a variable."""
    return isinstance(atom, core.Literal)


def nbytes(atom: Atom) -> int:
    """The size of an atom's value in bytes."""
    aval = atom.aval
    return aval.size * getattr(aval.dtype, "itemsize", 8)


# Calls that mean no more than their body.
_INLINED = {"jit", "pjit", "closed_call", "core_call"}


def flatten(closed: core.ClosedJaxpr, labeler: Labeler) -> FlatStep:
    """Opens a traced step.

    Args:
      closed: The step, traced with logical axes, its microbatch loop a `scan` in `LOOP_SCOPE`.
      labeler: Finds the task of a scope.

    Returns:
      The flat step.

    Raises:
      PlacementError: There is more than one microbatch loop, or a `scan` or `while` whose body
        belongs to several tasks.
    """
    opener = _Opener(labeler)
    arguments = [new_variable(var.aval) for var in closed.jaxpr.invars]
    step = FlatStep(arguments)
    opener.step = step
    step.outputs = opener.inline(closed.jaxpr, closed.consts, arguments, Scope(), step.after)
    _drop_unchanged(step)
    _unroll_single(step)
    step.outputs = opener.distinct(step.outputs)
    _split_outer(step)
    return step


class _Opener:
    """The walk of `flatten`: emits renamed equations into a step's sections."""

    step: FlatStep

    def __init__(self, labeler: Labeler):
        self.labeler = labeler

    def inline(self, jaxpr, consts, args: Sequence[Atom], scope: Scope, out: list[Node]):
        """Emits a jaxpr's equations with `args` for its inputs; returns its outputs."""
        env = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(value, var.aval, scope, out)

        def read(atom):
            return atom if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars], scope, out)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, value, aval, scope: Scope, out: list[Node]) -> Atom:
        """Gives a closed-over array a variable, as host memory: an array knows the trace's mesh."""
        if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            var = new_variable(aval)
            self.step.constants[var] = np.asarray(value)
            return var
        impl, data = jax.random.key_impl(value), np.asarray(jax.random.key_data(value))
        var = new_variable(jax.core.ShapedArray(data.shape, data.dtype))
        self.step.constants[var] = data
        return self.traced(
            lambda data: jax.random.wrap_key_data(data, impl=impl), [var], scope, out
        )

    def equation(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        here = scope + parse_scope(equation_scope_text(eqn))
        name = eqn.primitive.name
        if name in _INLINED:
            body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self.inline(body.jaxpr, body.consts, args, here, out)
        if name == "scan" and LOOP_SCOPE in here.path:
            return self.loop(eqn, args)
        outer = out is self.step.after
        if name == "cond" and (outer or len(self.body_labels(eqn, here)) > 1):
            return self.both_branches(eqn, args, here, out)
        if name in ("checkpoint", "remat", "remat2") and len(self.body_labels(eqn, here)) > 1:
            return self.rematerialization(eqn, args, here, out)
        if name == "sharding_constraint" and args[0] in self.step.arguments:
            return [self.constrain_argument(eqn, args[0], here, out)]
        return self.emit(eqn, args, here, out)

    def emit(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        label = self.labeler(scope)
        if label is None and (labels := self.body_labels(eqn, scope)):
            if len({labelled.task.mesh for labelled in labels}) > 1:
                names = sorted(labelled.name for labelled in labels)
                raise PlacementError(
                    f"A `{eqn.primitive.name}` in scope {'/'.join(scope.path) or '(top)'!r} spans "
                    f"several tasks: {', '.join(names)}. A loop cannot be cut: write its "
                    "iterations as separate modules (a Python loop), or keep it inside one task."
                )
            label = labels[0]
        outvars = [new_variable(var.aval) for var in eqn.outvars]
        out.append(Node(eqn.replace(invars=list(args), outvars=outvars), scope, label))
        return outvars

    def body_labels(self, eqn, scope: Scope) -> list[Label]:
        """The distinct tasks inside an equation that has sub-programs."""
        if self.labeler(scope) is not None:
            return []
        found: dict[Any, Label] = {}
        for jaxpr in jaxprs_in_params(eqn.params):
            for inner in jaxpr.eqns:
                inside = scope + parse_scope(equation_scope_text(inner))
                label = self.labeler(inside)
                labels = [label] if label else self.body_labels(inner, inside)
                for each in labels:
                    found.setdefault(each.task.mesh, each)
        return list(found.values())

    def constrain_argument(self, eqn, argument, scope: Scope, out: list[Node]) -> Atom:
        """Turns a constraint on a step argument into how that argument is stored."""
        label = self.labeler(scope)
        spec = eqn.params["sharding"].spec
        known = self.step.constraints.setdefault(argument, (spec, label))
        if known[0] == spec:
            return argument
        return self.emit(eqn, [argument], scope, out)[0]

    def rematerialization(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        """Opens a remat that spans several tasks; see `rematerialize`."""
        start = len(out)
        results = self.inline(eqn.params["jaxpr"], (), args, scope, out)
        if eqn.params["differentiated"]:
            out[start:] = [replace(node, recomputed=True) for node in out[start:]]
        return results

    def both_branches(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        """Evaluates every branch of a `cond` and selects: they may lie on several submeshes."""
        index, *operands = args
        branches = [
            self.inline(branch.jaxpr, branch.consts, operands, scope, out)
            for branch in eqn.params["branches"]
        ]
        return [
            self.traced(jax.lax.select_n, [index, *cases], scope, out)
            for cases in zip(*branches, strict=True)
        ]

    def traced(self, function, atoms: Sequence[Atom], scope: Scope, out: list[Node]) -> Atom:
        """Emits the equations of a JAX function of one result."""
        avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        closed = jax.make_jaxpr(function)(*avals)
        return self.inline(closed.jaxpr, closed.consts, atoms, scope, out)[0]

    def distinct(self, results: Sequence[Atom]) -> list[core.Var]:
        """Gives each result of the step a variable of its own.

        Two state leaves in one array (parameters, and their average at the start) could not both
        be donated to the next step.
        """
        found: dict[core.Var, None] = {}
        for atom in results:
            if is_literal(atom) or atom in found:
                atom = self.traced(jnp.copy, [atom], Scope(), self.step.after)
            found[atom] = None
        return list(found)

    def variable(self, atom: Atom, out: list[Node]) -> core.Var:
        """Gives a literal a variable."""
        if not is_literal(atom):
            return atom
        return self.traced(jnp.copy, [atom], Scope(), out)

    def loop(self, eqn, args) -> list[Atom]:
        step = self.step
        if step.loop or step.carries or step.slices:
            raise PlacementError("A step may hold one microbatch loop. Got a second one.")
        body = eqn.params["jaxpr"]
        split = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
        consts, whole = args[: split[0]], args[split[1] :]
        initial = [self.variable(atom, step.after) for atom in args[split[0] : split[1]]]
        inner = [new_variable(var.aval) for var in body.jaxpr.invars[split[0] :]]
        carried, sliced = inner[: len(initial)], inner[len(initial) :]
        step.microbatches = eqn.params["length"]
        # Equations of the body are not placed under the loop's own scope: its name means nothing.
        results = self.inline(body.jaxpr, body.consts, [*consts, *inner], Scope(), step.loop)
        finals = [new_variable(var.aval) for var in eqn.outvars]
        results = [self.variable(atom, step.loop) for atom in results]
        updates, stacked = results[: len(initial)], results[len(initial) :]
        step.carries = [
            Carry(*parts)
            for parts in zip(carried, initial, updates, finals[: len(initial)], strict=True)
        ]
        step.slices = [Slice(*pair) for pair in zip(sliced, whole, strict=True)]
        step.stacked = [
            Stacked(*pair) for pair in zip(stacked, finals[len(initial) :], strict=True)
        ]
        return finals


def _drop_unchanged(step: FlatStep) -> None:
    """What every microbatch hands on as it got it (a random key) is read from outside."""
    same = [carry for carry in step.carries if carry.update is carry.inner]
    _replace_carries(step, same)


def _unroll_single(step: FlatStep) -> None:
    """With one microbatch nothing is carried: the loop reads what the carry starts with."""
    if step.microbatches == 1:
        _replace_carries(step, step.carries)


def _replace_carries(step: FlatStep, carries: list[Carry]) -> None:
    """Makes the loop read what some carries start with, and the rest of the step their update."""
    known = {carry.inner: carry.initial for carry in carries}
    step.loop = [substitute(node, known) for node in step.loop]
    finals = {carry.final: known.get(carry.update, carry.update) for carry in carries}
    step.after = [substitute(node, finals) for node in step.after]
    step.outputs = [replace_atom(atom, finals) for atom in step.outputs]
    step.carries = [
        replace(carry, update=replace_atom(carry.update, known))
        for carry in step.carries
        if carry not in carries
    ]


def substitute(node: Node, known: dict[core.Var, Atom]) -> Node:
    """Renames a node's inputs."""
    if not any(var in known for var in node.inputs):
        return node
    invars = [replace_atom(atom, known) for atom in node.eqn.invars]
    return replace(node, eqn=node.eqn.replace(invars=invars))


def replace_atom(atom: Atom, known: dict[core.Var, Atom]) -> Atom:
    """Looks an atom up in a renaming."""
    return atom if is_literal(atom) else known.get(atom, atom)


def _split_outer(step: FlatStep) -> None:
    """Moves the outer equations that the loop waits for in front of it."""
    defined = {var for node in step.after for var in node.outputs}
    needed = {carry.initial for carry in step.carries}
    needed |= {entry.whole for entry in step.slices if not is_literal(entry.whole)}
    needed |= {var for node in step.loop for var in node.inputs if var in defined}
    before = []
    for node in reversed(step.after):
        if any(var in needed for var in node.outputs):
            needed.update(node.inputs)
            before.append(node)
    first = set(map(id, before))
    step.before = before[::-1]
    step.after = [node for node in step.after if id(node) not in first]
