"""A planned, compiled, callable step: state and batch in, results and new state out.

trace_step                    the same plan on every rank, compared by fingerprint
compile -> open -> warm up    each rank only its own tasks, all before the first message
call                          place the batch, run the instructions, assemble the results
"""

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.batch import PlacedBatch, Placer
from multimesh.config import read_config
from multimesh.dump import dump_step
from multimesh.executor import Executor
from multimesh.fingerprint import compare, describe_plan
from multimesh.lowering import RankProgram, rank_program
from multimesh.plan import Bundle, Instance
from multimesh.results import Results
from multimesh.source import Context, StepSource, TracedStep, trace_step
from multimesh.stages.program import Program, compile_task
from multimesh.stages.shardings import Submesh
from multimesh.stages.variants import Variant
from multimesh.state import State
from multimesh.transport import Channel, Layout, Transfer

__all__ = ["Step", "build_step", "warm_up"]


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
    traced = trace_step(source, context)
    compare(
        context.group,
        describe_plan(traced.plan),
        "The model, its options and everything it closes over must be equal on all ranks.",
    )
    step = Step(source, context, traced)
    if (folder := read_config().dump) is not None:
        dump_step(folder, traced.plan, step.executor.compiled, context.group.rank)
    return step


class Step:
    """A compiled step of this rank.

    Attributes:
      plan: What all ranks agreed on.
      compile_count: How many programs this rank compiled for it.
      shares: How the batch is divided over ranks.
    """

    def __init__(self, source: StepSource, context: Context, traced: TracedStep):
        self.plan = traced.plan
        self.context = context
        self.shares = traced.shares
        self.results_tree = traced.results_tree
        rank = context.group.rank
        cut = self.plan.cut
        state_leaves = traced.state_tree.num_leaves
        arguments = cut.step.arguments
        donated = [leaf for leaf in sorted(traced.donated) if self._is_replaced(leaf)]
        program = rank_program(self.plan, rank, [arguments[leaf] for leaf in donated])
        compiled = self._compile(program, rank)
        self.compile_count = len(compiled)
        channels = self._open_channels()
        context.group.barrier("building a step")
        warm_up(cut.submeshes, rank)
        self.executor = Executor(self.plan, program, compiled, channels, context.transport)
        self.placer = Placer(self.plan, state_leaves, source.spec, traced.shares, context.group)
        self.state = State(self.plan, program.slots, traced.state_tree, context.mesh, rank, donated)
        first_state = traced.results_tree.num_leaves
        self.results = Results(self.plan, program.slots, first_state, self.state)
        self.slots = program.slots

    def _compile(self, program: RankProgram, rank: int) -> dict[tuple[int, int], Program]:
        """Compiles this rank's tasks, those of the loop for each size of microbatch."""
        compiled = {}
        for number, variant in enumerate(self.plan.variants):
            cut = variant.cut
            for index, task in enumerate(cut.tasks):
                again = number > 0 and task.section != "loop"
                if again or rank not in cut.submeshes[task.submesh].processes:
                    continue
                donated = {variant.twins.get(var, var) for var in program.donated[index]}
                compiled[index, number] = compile_task(task, cut.step, cut.shardings, donated)
        return compiled

    def _is_replaced(self, leaf: int) -> bool:
        """Whether a leaf of the state lies on one submesh, and is not returned as it came."""
        cut = self.plan.cut
        argument = cut.step.arguments[leaf]
        return cut.homes[argument] is not None and argument not in cut.step.outputs

    def _open_channels(self) -> dict[tuple[int, int], Channel]:
        """Opens a channel for each bundle and size of microbatch, in one order on all ranks."""
        return {
            (index, number): self._open(bundle, variant)
            for index, bundle in enumerate(self.plan.bundles)
            for number, variant in enumerate(self.plan.variants)
            if any(self.plan.variant_of(k) == number for k in bundle.microbatches)
        }

    def _open(self, bundle: Bundle, variant: Variant) -> Channel:
        of = variant.cut.shardings.of
        values = [variant.twins.get(var, var) for var in bundle.vars]

        def layouts(submesh):
            return tuple(Layout(var.aval.shape, var.aval.dtype, of(var, submesh)) for var in values)

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
        for theirs in self.context.group.allgather(medians, "measure"):
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
