"""A planned, compiled, callable step: state and batch in, results and new state out.

trace -> cut -> plan          the same on every rank, compared by fingerprint
compile -> open -> warm up    each rank only its own tasks, all before the first message
call                          place the batch, run the instructions, assemble the results
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.batch import BatchSpec, PlacedBatch, Placer, Shares, find_shares
from multimesh.errors import UsageError
from multimesh.executor import Executor
from multimesh.fingerprint import compare, describe_plan
from multimesh.lowering import rank_program
from multimesh.plan import Instance, Plan, make_plan
from multimesh.results import Results
from multimesh.stages.cut import Signature, cut
from multimesh.stages.program import compile_task
from multimesh.stages.registry import Registry
from multimesh.stages.shardings import Submesh
from multimesh.stages.trace import logical_axis_names, trace
from multimesh.state import State
from multimesh.transport import Group, Layout, Transfer, Transport

__all__ = ["Context", "Step", "StepSource", "build_step"]


@dataclass(frozen=True)
class Context:
    """Where a step runs.

    Attributes:
      mesh: All its devices.
      registry: The registered tasks.
      group: The control plane.
      transport: The data plane.
    """

    mesh: Mesh
    registry: Registry
    group: Group
    transport: Transport

    def axis_names(self, batch_axis: str) -> tuple[str, ...]:
        """The axis names that are known before a model is traced."""
        tasks = [entry.task for entry in self.registry.entries if entry.task]
        return logical_axis_names(tasks, (*map(str, self.mesh.axis_names), batch_axis))


@dataclass(frozen=True)
class StepSource:
    """What a step computes, as a function to trace.

    Attributes:
      function: `(state, batch) -> (results, new_state)`; `batch` has its microbatches stacked in
        front: `(microbatches, rows, ...)`. A step without a new state returns None for it.
      state: The state's avals, a pytree; it may depend on the rows of the batch.
      companions: State leaf -> the state leaf (a parameter) that it lives with.
      shardings: State leaf -> its sharding, where it exists already.
      spec: The structure of the batch that one rank gives.
      local: Whether that is a share of the batch, or the whole.
      microbatches: How many there are.
      batch_axis: The logical name of the rows.
      schedule: The name of the schedule.
      donate: Whether the step may overwrite the state.
      check_patterns: Whether every registered pattern must match.
    """

    function: Callable[[Any, Any], tuple[Any, Any]]
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


def build_step(source: StepSource, context: Context) -> "Step":
    """Traces, cuts, plans and compiles a step. Collective: every rank makes the same call.

    Args:
      source: What to compute.
      context: Where.

    Returns:
      The step.

    Raises:
      UsageError: Something in the model, the registry or the batch does not fit.
      RankMismatchError: The ranks do not agree.
    """
    tracer = _Tracer(source, context)
    traced = tracer.trace(shares=1)
    shares = Shares(1, (0,) * context.group.size)
    if source.local:
        shares = find_shares(traced.plan.cut, context.group.size, source.batch_axis)
        if shares.count > 1:
            traced = tracer.trace(shares.count)
    compare(
        context.group,
        describe_plan(traced.plan),
        "The model, its options and everything it closes over must be equal on all ranks.",
    )
    return Step(source, context, traced, shares)


@dataclass(frozen=True)
class _Traced:
    plan: Plan
    state_tree: Any
    results_tree: Any
    first_batch: int
    first_state: int


class _Tracer:
    """Traces a step for a number of shares."""

    def __init__(self, source: StepSource, context: Context):
        self.source = source
        self.context = context

    def trace(self, shares: int) -> _Traced:
        source, context = self.source, self.context
        rows = source.spec.rows * shares
        state = source.state(rows)
        batch = self._batch(rows // source.microbatches)
        names = context.axis_names(source.batch_axis)
        trees: dict[str, Any] = {}

        def flat(state_leaves, batch_leaves):
            state = jax.tree.unflatten(trees["state"], state_leaves)
            batch = jax.tree.unflatten(source.spec.tree, batch_leaves)
            results, new_state = source.function(state, batch)
            leaves, trees["results"] = jax.tree.flatten(results)
            new_leaves, new_tree = jax.tree.flatten(new_state)
            _check_same_tree(trees["state"], new_tree, new_state is not None)
            return leaves, new_leaves

        paths, trees["state"] = jax.tree_util.tree_flatten_with_path(state)
        state_leaves = [leaf for _, leaf in paths]
        closed = trace(flat, (state_leaves, batch), names)
        first_state = trees["results"].num_leaves
        updated = len(closed.jaxpr.outvars) - first_state
        signature = Signature(
            names=[*(jax.tree_util.keystr(path) for path, _ in paths), *source.spec.names],
            replaced={index: first_state + index for index in range(updated)},
            companions=source.companions,
            shardings=source.shardings,
            rows=rows // source.microbatches,
            batch_axis=source.batch_axis,
        )
        pieces = cut(
            closed,
            context.registry,
            context.mesh,
            signature,
            check_patterns=source.check_patterns,
        )
        plan = make_plan(pieces, source.schedule)
        return _Traced(plan, trees["state"], trees["results"], len(state_leaves), first_state)

    def _batch(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        spec = self.source.spec
        return [
            jax.ShapeDtypeStruct((self.source.microbatches, rows, *shape[1:]), dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]


def _check_same_tree(old, new, returned: bool) -> None:
    if returned and old != new:
        raise UsageError(f"The step must return a state of the same tree. Got {new} for {old}.")


class Step:
    """A compiled step of this rank.

    Attributes:
      plan: What all ranks agreed on.
      compile_count: How many programs this rank compiled for it.
      shares: How the batch is divided over ranks.
    """

    def __init__(self, source: StepSource, context: Context, traced: _Traced, shares: Shares):
        self.plan = traced.plan
        self.context = context
        self.shares = shares
        self.results_tree = traced.results_tree
        rank = context.group.rank
        cut = self.plan.cut
        donate = cut.step.arguments[: traced.first_batch] if source.donate else ()
        program = rank_program(self.plan, rank, self._donatable(donate))
        mine = [i for i, t in enumerate(cut.tasks) if rank in cut.submeshes[t.submesh].processes]
        compiled = {
            index: compile_task(cut.tasks[index], cut.step, cut.shardings, program.donated[index])
            for index in mine
        }
        self.compile_count = len(compiled)
        channels = [self._open(bundle) for bundle in self.plan.bundles]
        context.group.barrier()
        warm_up(cut.submeshes, rank)
        self.executor = Executor(self.plan, program, compiled, channels, context.transport)
        self.placer = Placer(cut, traced.first_batch, source.spec, shares, context.group)
        self.state = State(self.plan, program.slots, traced.state_tree, context.mesh, rank)
        self.results = Results(self.plan, program.slots, traced.first_state, self.state)
        self.slots = program.slots

    def _donatable(self, arguments: Sequence) -> list:
        """State on one submesh that is replaced; what is returned as it came is kept."""
        cut = self.plan.cut
        return [
            argument
            for argument in arguments
            if cut.homes[argument] is not None and argument not in cut.step.outputs
        ]

    def _open(self, bundle):
        of = self.plan.cut.shardings.of

        def layouts(submesh):
            return tuple(
                Layout(var.aval.shape, var.aval.dtype, of(var, submesh)) for var in bundle.vars
            )

        depth = min(len(bundle.microbatches), len(self.plan.cut.submeshes) + 1)
        transfer = Transfer(bundle.name, layouts(bundle.source), layouts(bundle.target))
        return self.context.transport.open(transfer, depth)

    def prepare(self, batch: Any) -> PlacedBatch:
        """Places a host batch on the devices that read it."""
        return self.placer.place(batch)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the step.

        Args:
          state: The state, as the initializer or the step before returned it.
          batch: A host batch, or what `prepare` made of one.

        Returns:
          The results and the new state (None for a step without one).
        """
        if not isinstance(batch, PlacedBatch):
            batch = self.placer.place(batch)
        elif batch.owner is not self.placer:
            raise UsageError(
                "This batch was prepared for another step. Use the prepare_batch that "
                "parallelize_step returned together with this step_fn."
            )
        store, leaves = self._fill(state, batch)
        self.executor.run(store)
        return self._collect(store, leaves)

    def measure(self, state: Any, batch: PlacedBatch) -> tuple[dict[str, float], Any, Any]:
        """Runs the step task by task, and takes the time of each. Collective.

        Returns:
          The median seconds of each task of the plan, on its slowest rank; then the results and
          the new state.
        """
        store, leaves = self._fill(state, batch)
        measured = self.executor.measure(store)
        medians = {self.plan.tasks[i].name: statistics.median(t) for i, t in measured.items()}
        slowest: dict[str, float] = {}
        for theirs in self.context.group.allgather(medians):
            for name, seconds in theirs.items():
                slowest[name] = max(seconds, slowest.get(name, 0.0))
        return slowest, *self._collect(store, leaves)

    def _fill(self, state: Any, batch: PlacedBatch) -> tuple[list, list]:
        store: list[Any] = [None] * self.executor.size
        leaves = self.state.fill(store, state)
        for (var, submesh, microbatch), array in batch.arrays.items():
            slot = self.slots.get((Instance(var, microbatch), submesh))
            if slot is not None:
                store[slot] = array
        return store, leaves

    def _collect(self, store: list, leaves: list) -> tuple[Any, Any]:
        results, new_leaves = self.results.collect(store, leaves)
        new_state = jax.tree.unflatten(self.state.tree, new_leaves) if new_leaves else None
        return jax.tree.unflatten(self.results_tree, results), new_state


def warm_up(submeshes: Sequence[Submesh], rank: int) -> None:
    """Runs one small collective on every submesh that spans ranks, in one order on all of them.

    Gloo connects at first use, with a deadline that a rank that is still busy would miss.
    """
    for place in submeshes:
        if len(place.processes) > 1 and rank in place.processes:
            axes = PartitionSpec(place.mesh.axis_names)
            sharding = NamedSharding(place.mesh, axes)
            ones = np.ones(len(place.task_mesh.devices), np.float32)
            parts = [
                jax.device_put(ones[index], device)
                for device, index in sharding.addressable_devices_indices_map(ones.shape).items()
            ]
            array = jax.make_array_from_single_device_arrays(ones.shape, sharding, parts)
            whole = NamedSharding(place.mesh, PartitionSpec())
            jax.jit(jnp.sum, out_shardings=whole)(array).block_until_ready()
