"""What a step computes, and how that becomes a plan: trace, cut, schedule.

Everything here is the same on every rank, and nothing is compiled or sent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from multimesh.batch import BatchSpec, Shares, find_shares
from multimesh.errors import UsageError
from multimesh.plan import Plan, make_plan
from multimesh.stages.cut import CutStep, Signature, cut
from multimesh.stages.options import DEFAULTS, Options
from multimesh.stages.registry import Registry
from multimesh.stages.shardings import resolve_spec
from multimesh.stages.trace import trace
from multimesh.stages.variants import Variant, is_same_outside, make_variant, microbatch_sizes
from multimesh.transport import Group, Transport

__all__ = ["Context", "StepSource", "TracedStep", "trace_step"]


@dataclass(frozen=True)
class Context:
    """Where a step runs.

    Attributes:
      mesh: All its devices.
      registry: The registered tasks.
      group: The control plane.
      transport: The data plane.
      options: How steps are cut.
    """

    mesh: Mesh
    registry: Registry
    group: Group
    transport: Transport
    options: Options = DEFAULTS

    def axis_names(self, batch_axis: str) -> tuple[str, ...]:
        """The axis names that are known before a model is traced."""
        names = self.registry.axis_names() | {*map(str, self.mesh.axis_names), batch_axis}
        return tuple(sorted(names))


@dataclass(frozen=True)
class StepSource:
    """What a step computes, as a function to trace.

    Attributes:
      function: `(state, batch, numbers, rows) -> (results, new_state)`; `batch` has its
        microbatches stacked in front: `(microbatches, rows, ...)`, `numbers` is int32
        `(microbatches,)`, and `rows` how many rows all microbatches have. A step without a new
        state returns None for it.
      state: The state's avals, a pytree; it may depend on the rows of the batch.
      companions: State leaf -> the state leaf (a parameter) that it lives with.
      shardings: State leaf -> its sharding, where it exists already.
      spec: The structure of the batch that one rank gives; without leaves, the function says by
        itself how often its loop runs, and its results stay where they are computed.
      local: Whether that is a share of the batch, or the whole.
      microbatches: How many there are.
      batch_axis: The logical name of the rows.
      schedule: The name of the schedule.
      donate: Whether the step may overwrite the state. Otherwise it may overwrite what the function
        itself, if it is a `jax.jit`, donates.
      check_patterns: Whether every registered pattern must match.
      replicate_inputs: Whether every device of a stage that reads the batch gets all of it.
      varying: State leaves that stand for a batch.
      renews: Without a new state: from the avals of the results to the state leaves that some of
        them (both numbered as leaves) are to take the place of.
    """

    function: Callable[[Any, Any, jax.Array, int], tuple[Any, Any]]
    state: Callable[[int], Any]
    companions: Mapping[int, int]
    shardings: Mapping[int, NamedSharding]
    spec: BatchSpec
    local: bool
    microbatches: int
    batch_axis: str = "batch"
    schedule: str = "1f1b"
    donate: bool = True
    check_patterns: bool = True
    replicate_inputs: bool = False
    varying: Sequence[int] = ()
    renews: Callable[[Any], Mapping[int, int]] | None = None


@dataclass(frozen=True)
class TracedStep:
    """A planned step.

    Attributes:
      plan: The plan.
      shares: How the batch is divided over ranks.
      state_tree: The structure of the state.
      results_tree: The structure of the results.
      donated: The state leaves that the step may overwrite.
    """

    plan: Plan
    shares: Shares
    state_tree: Any
    results_tree: Any
    donated: frozenset[int]


def trace_step(source: StepSource, context: Context) -> TracedStep:
    """Traces, cuts and plans a step.

    Args:
      source: What to compute.
      context: Where.

    Raises:
      UsageError: Something in the model, the registry or the batch does not fit.
    """
    tracer = _Tracer(source, context)
    rows = source.spec.rows
    largest = microbatch_sizes(rows, source.microbatches)[0]
    pieces = tracer.cut(largest, rows)
    shares = Shares(1, (0,) * context.group.size)
    if source.local and not source.replicate_inputs:
        shares = find_shares(pieces, context.group.size, source.batch_axis)
    unit = _rows_unit(pieces, shares.count, source.batch_axis)
    sizes = microbatch_sizes(rows, source.microbatches, unit)
    if shares.count > 1 or sizes[0] != largest:
        pieces = tracer.cut(sizes[0] * shares.count, rows * shares.count)
    pieces, variants = _vary(tracer, pieces, sizes, shares.count)
    if not source.spec.shapes:
        sizes = (1,) * pieces.step.microbatches
    plan = make_plan(pieces, pieces.step.schedule or source.schedule, sizes, variants)
    trees = tracer.trees
    return TracedStep(plan, shares, trees["state"], trees["results"], tracer.donated)


def _vary(
    tracer: "_Tracer", pieces: CutStep, sizes: Sequence[int], shares: int
) -> tuple[CutStep, list[Variant]]:
    """Cuts the step for the other sizes of its microbatches too.

    What the loop computes alike for every microbatch is moved out of it, and so computed once for
    all sizes. Where it depends on the size (a penalty on the parameters has another part in a
    smaller microbatch), it must stay.
    """
    others = sorted({*sizes} - {sizes[0]})

    def cut_for(size, keep_loop=False):
        return tracer.cut(size * shares, sum(sizes) * shares, keep_loop)

    cuts = [cut_for(size) for size in others]
    if not all(is_same_outside(pieces, other) for other in cuts):
        pieces, *cuts = [cut_for(size, keep_loop=True) for size in (sizes[0], *others)]
    return pieces, [make_variant(pieces, *each) for each in zip(cuts, others, strict=True)]


def _rows_unit(pieces: CutStep, shares: int, batch_axis: str) -> int:
    """The rows of a share that spread evenly over the devices of every submesh that reads them."""
    sliced = {entry.inner for entry in pieces.step.slices}
    unit = 1
    for place in {task.submesh for task in pieces.tasks if sliced & set(task.inputs)}:
        submesh = pieces.submeshes[place]
        ((axes),) = resolve_spec((batch_axis,), submesh.axes)
        devices = math.prod(submesh.mesh.shape[axis] for axis in axes)
        unit = math.lcm(unit, devices // math.gcd(devices, shares))
    return unit


class _Tracer:
    """Traces and cuts a step for microbatches of some rows."""

    def __init__(self, source: StepSource, context: Context):
        self.source = source
        self.context = context
        self.trees: dict[str, Any] = {}
        self.donated: frozenset[int] = frozenset()

    def cut(self, size: int, rows: int, keep_loop: bool = False) -> CutStep:
        """Cuts the step for microbatches of `size` rows of a batch of `rows`, over all shares."""
        source, context, trees = self.source, self.context, self.trees
        paths, trees["state"] = jax.tree_util.tree_flatten_with_path(source.state(rows))
        state = [leaf for _, leaf in paths]

        def flat(state_leaves, batch_leaves, numbers):
            state = jax.tree.unflatten(trees["state"], state_leaves)
            batch = jax.tree.unflatten(source.spec.tree, batch_leaves)
            results, new_state = source.function(state, batch, numbers, rows)
            leaves, trees["results"] = jax.tree.flatten(results)
            new_leaves, new_tree = jax.tree.flatten(new_state)
            _check_same_tree(trees["state"], new_tree, new_state is not None)
            return leaves, new_leaves

        names = context.axis_names(source.batch_axis)
        closed = trace(flat, (state, *self._batch(size)), names)
        self.donated = frozenset(range(len(state)) if source.donate else _donated(closed.jaxpr))
        signature = Signature(
            names=[
                *(jax.tree_util.keystr(path) for path, _ in paths),
                *source.spec.names,
                "the number of the microbatch",
            ],
            replaced=self._replaced(closed),
            companions=source.companions,
            shardings=source.shardings,
            number=len(paths) + len(source.spec.names),
            rows=size,
            batch_axis=source.batch_axis,
            replicate_inputs=source.replicate_inputs,
            varying=source.varying,
            scattered=not source.spec.shapes,
        )
        return cut(
            closed,
            context.registry,
            context.mesh,
            signature,
            check_patterns=source.check_patterns,
            keep_loop=keep_loop,
            options=context.options,
        )

    def _replaced(self, closed: core.ClosedJaxpr) -> Mapping[int, int]:
        """State leaf -> the result that takes its place."""
        tree = self.trees["results"]
        if self.source.renews is not None:
            return self.source.renews(jax.tree.unflatten(tree, closed.out_avals))
        updated = len(closed.jaxpr.outvars) - tree.num_leaves
        return {index: tree.num_leaves + index for index in range(updated)}

    def _batch(self, rows: int) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        count, spec = self.source.microbatches, self.source.spec
        leaves = [
            jax.ShapeDtypeStruct((count, rows, *shape[1:]), dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        return leaves, jax.ShapeDtypeStruct((count,), jnp.int32)


def _donated(jaxpr: core.Jaxpr) -> list[int]:
    """The arguments that a program donates: one that is nothing but a call of a `jax.jit`."""
    if len(jaxpr.eqns) != 1 or "donated_invars" not in jaxpr.eqns[0].params:
        return []
    (call,) = jaxpr.eqns
    donated = {
        atom
        for atom, is_donated in zip(call.invars, call.params["donated_invars"], strict=True)
        if is_donated
    }
    return [index for index, var in enumerate(jaxpr.invars) if var in donated]


def _check_same_tree(old, new, returned: bool) -> None:
    if returned and old != new:
        raise UsageError(f"The step must return a state of the same tree. Got {new} for {old}.")
