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

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from multimesh._compat import equation_scope_text, jaxprs_in_params, new_variable
from multimesh.errors import PlacementError
from multimesh.stages.flat import Atom, Carry, FlatStep, Node, Slice, Stacked, is_literal
from multimesh.stages.registry import Label
from multimesh.stages.scopes import LOOP_SCOPE, SCHEDULE_SCOPE, Scope, parse_scope
from multimesh.stages.sections import divide, drop_unchanged, gather_labelled, unroll_single

__all__ = ["flatten"]

logger = logging.getLogger("multimesh")

Labeler = Callable[[Scope], Label | None]


# Calls that mean no more than their body; derivatives have been taken already.
_INLINED = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
}  # fmt: skip

# What users write around tasks: a task inside of it, inside of a task, is looked for.
_CONTROL_FLOW = {"scan", "while", "cond", "checkpoint", "remat", "remat2"}


def flatten(closed: core.ClosedJaxpr, labeler: Labeler, number: int | None = None) -> FlatStep:
    """Opens a traced step.

    A loop over microbatches that was differentiated is two loops, which cannot be interleaved:
    where there are several, each is unrolled. A step without any is one microbatch.

    Args:
      closed: The step, traced with logical axes, its microbatch loop a `scan` in `LOOP_SCOPE` over
        arguments, or over an iota that stands for the numbers of the microbatches.
      labeler: Finds the task of a scope.
      number: The argument with the numbers of the microbatches, if there is one.

    Returns:
      The flat step.

    Raises:
      PlacementError: A `scan` or `while` has a body that belongs to several tasks, or a loop that
        slices arguments is not the only one.
    """
    opener = _Opener(labeler)
    arguments = [new_variable(var.aval) for var in closed.jaxpr.invars]
    step = FlatStep(arguments)
    opener.step = step
    opener.number = None if number is None else arguments[number]
    opener.loops = _count_loops(closed.jaxpr, Scope())
    step.outputs = opener.inline(closed.jaxpr, closed.consts, arguments, Scope(), step.after)
    drop_unchanged(step)
    unroll_single(step)
    step.outputs = opener.distinct(step.outputs)
    if opener.loops and not opener.is_open:
        logger.warning(
            "%d loops over microbatches are unrolled: there are several, or a gradient is taken of "
            "the whole. So there is no pipeline, and no schedule. For a gradient, differentiate "
            "inside: microbatch(jax.value_and_grad(loss), ...).",
            opener.loops,
        )
    if opener.is_open:
        divide(step)
    else:
        gather_labelled(step)
    return step


def _count_loops(jaxpr: core.Jaxpr, scope: Scope) -> int:
    """How many loops over microbatches a program has."""
    count = 0
    for eqn in jaxpr.eqns:
        here = scope + parse_scope(equation_scope_text(eqn))
        is_loop = eqn.primitive.name == "scan" and LOOP_SCOPE in here.path
        inside = Scope() if is_loop else here
        bodies = jaxprs_in_params(eqn.params)
        count += is_loop + sum(_count_loops(body, inside) for body in bodies)
    return count


class _Opener:
    """The walk of `flatten`: emits renamed equations into a step's sections.

    Attributes:
      step: What it makes.
      number: The argument with the numbers of the microbatches.
      loops: How many loops over microbatches there are.
      is_open: Whether one of them has become the loop of the step.
      stacks: What an unrolled loop has stacked -> its value of each iteration.
    """

    step: FlatStep
    number: core.Var | None
    loops: int

    def __init__(self, labeler: Labeler):
        self.labeler = labeler
        self.is_open = False
        self.stacks: dict[core.Var, list[Atom]] = {}

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
            whole = self.sliced_arguments(eqn, args, out)
            if whole is None or self.loops > 1:
                return self.unrolled(eqn, args, _around_loop(here), out)
            return self.loop(eqn, args, whole, here)
        if name == "cond" and self.must_open(eqn, here, out):
            return self.both_branches(eqn, args, here, out)
        if name in ("checkpoint", "remat", "remat2") and len(self.body_labels(eqn, here)) > 1:
            return self.rematerialization(eqn, args, here, out)
        if name == "sharding_constraint" and args[0] in self.step.arguments:
            return [self.constrain_argument(eqn, args[0], here, out)]
        return self.emit(eqn, args, here, out)

    def emit(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        labels = self.body_labels(eqn, scope)
        if len(labels) > 1:
            found = sorted(f"{each.name} on devices {each.task.mesh.devices}" for each in labels)
            raise PlacementError(
                f"A `{eqn.primitive.name}` in scope {'/'.join(scope.path) or '(top)'!r} spans "
                f"several tasks: {', '.join(found)}. A loop (scan, while_loop, fori_loop) cannot "
                "be cut: write its iterations as separate modules (a Python loop), or keep it "
                "inside one task."
            )
        label = labels[0] if labels else self.labeler(scope)
        outvars = [new_variable(var.aval) for var in eqn.outvars]
        out.append(Node(eqn.replace(invars=list(args), outvars=outvars), scope, label))
        return outvars

    def body_labels(self, eqn, scope: Scope) -> list[Label]:
        """The tasks, of distinct submeshes, inside an equation that has sub-programs."""
        is_transparent = eqn.primitive.name in _CONTROL_FLOW | _INLINED
        if not is_transparent and self.labeler(scope) is not None:
            return []
        found: dict[Any, Label] = {}
        for jaxpr in jaxprs_in_params(eqn.params):
            for inner in jaxpr.eqns:
                if _is_counter(inner):
                    continue  # of a loop, which may call one task and compute nothing else
                inside = scope + parse_scope(equation_scope_text(inner))
                labels: list[Label | None] = [*self.body_labels(inner, inside)]
                for each in labels or [self.labeler(inside)]:
                    if each is not None:
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

    def must_open(self, eqn, scope: Scope, out: list[Node]) -> bool:
        """Whether the branches of a `cond` may lie on several submeshes.

        Outside the loop is the optimizer, which has no task. Without a loop there may be tasks. A
        branch that is opened is always computed, and a `while` in it might then never end.
        """
        labels = self.body_labels(eqn, scope)
        if len(labels) < 2 and self.labeler(scope) is not None:
            return False
        is_optimizer = out is self.step.after and (self.loops == 1 or not labels)
        return (is_optimizer and not _may_go_on(eqn)) or len(labels) > 1

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

    def sliced_arguments(self, eqn, args, out: list[Node]) -> list[core.Var] | None:
        """The step's arguments that a loop slices, or None where it slices something else."""
        found = []
        for atom in args[eqn.params["num_consts"] + eqn.params["num_carry"] :]:
            if self.number is not None and _is_iota(atom, out):
                atom = self.number
            elif atom not in self.step.arguments:
                return None
            elif self.loops > 1:
                raise PlacementError(
                    "A step that slices its batch into microbatches may hold no other loop over "
                    f"microbatches. Got {self.loops} of them: call multimesh.jax.microbatch only "
                    "within multimesh.jax.parallelize."
                )
            found.append(atom)
        return found

    def loop(self, eqn, args, whole: list[core.Var], scope: Scope) -> list[Atom]:
        """Opens the loop over microbatches: its body becomes the step's loop."""
        step = self.step
        self.is_open = True
        body = eqn.params["jaxpr"]
        split = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
        consts = args[: split[0]]
        initial = [self.variable(atom, step.after) for atom in args[split[0] : split[1]]]
        inner = [new_variable(var.aval) for var in body.jaxpr.invars[split[0] :]]
        carried, sliced = inner[: len(initial)], inner[len(initial) :]
        step.microbatches = eqn.params["length"]
        step.schedule = _schedule_of(scope)
        around = _around_loop(scope)
        results = self.inline(body.jaxpr, body.consts, [*consts, *inner], around, step.loop)
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

    def unrolled(self, eqn, args, scope: Scope, out: list[Node]) -> list[Atom]:
        """Emits every iteration of a loop, one after another."""
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        split = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
        consts, carry, whole = args[: split[0]], args[split[0] : split[1]], args[split[1] :]
        stacked: list[list[Atom]] = [[]] * length
        for index in reversed(range(length)) if eqn.params["reverse"] else range(length):
            slices = [self.slice(atom, index, scope, out) for atom in whole]
            given = [*consts, *carry, *slices]
            results = self.inline(body.jaxpr, body.consts, given, scope, out)
            carry, stacked[index] = results[: len(carry)], results[len(carry) :]
        return [
            *carry,
            *(self.stack(list(each), scope, out) for each in zip(*stacked, strict=True)),
        ]

    def slice(self, whole: Atom, index: int, scope: Scope, out: list[Node]) -> Atom:
        """One iteration's part of what an unrolled loop reads."""
        if not is_literal(whole) and whole in self.stacks:
            return self.stacks[whole][index]

        def take(whole):
            return jax.lax.index_in_dim(whole, index, keepdims=False)

        return self.traced(take, [whole], scope, out)

    def stack(self, parts: list[Atom], scope: Scope, out: list[Node]) -> Atom:
        """Stacks what the iterations of an unrolled loop return."""
        whole = self.traced(lambda *parts: jnp.stack(parts), parts, scope, out)
        self.stacks[whole] = parts
        return whole


def _is_counter(eqn) -> bool:
    """Whether an equation only computes single integers."""
    results = [var.aval for var in eqn.outvars]
    kinds = [jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool for aval in results]
    return bool(results) and all(kinds) and all(aval.shape == () for aval in results)


def _may_go_on(eqn) -> bool:
    """Whether an equation is or holds a loop that ends by a condition."""
    return eqn.primitive.name == "while" or any(
        _may_go_on(inner) for body in jaxprs_in_params(eqn.params) for inner in body.eqns
    )


def _around_loop(scope: Scope) -> Scope:
    """The scope that a loop over microbatches stands in: its own names mean nothing."""
    own = [
        place
        for place, name in enumerate(scope.path)
        if name == LOOP_SCOPE or name.startswith(SCHEDULE_SCOPE)
    ]
    return Scope(scope.path[: own[0]], scope.backward)


def _is_iota(atom: Atom, out: list[Node]) -> bool:
    """Whether an atom holds the numbers 0, 1, 2, ... of the iterations of a loop."""
    if is_literal(atom) or atom.aval.ndim != 1:
        return False
    return any(node.eqn.primitive.name == "iota" and atom in node.outputs for node in out)


def _schedule_of(scope: Scope) -> str | None:
    names = [name for name in scope.path if name.startswith(SCHEDULE_SCOPE)]
    return names[-1].removeprefix(SCHEDULE_SCOPE) if names else None
