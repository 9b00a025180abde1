"""The plan of a step: its tasks, their order, and what crosses submeshes.

Everything here is data, and the same on every rank.

A value of the loop exists once for each microbatch: an *instance* is a value and a microbatch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend import core

from multimesh.schedule import (
    Dependency,
    ScheduledTask,
    TaskGraph,
    Timeline,
    build,
    format_schedule,
    parse_schedule,
    simulate,
    validate,
)
from multimesh.stages.cut import CutStep
from multimesh.stages.partition import TaskSpec
from multimesh.stages.variants import Variant

__all__ = ["Bundle", "Flow", "Instance", "Plan", "make_plan"]


class Instance(NamedTuple):
    """A value of one microbatch; microbatch 0 for values that exist once a step."""

    var: core.Var
    microbatch: int


@dataclass(frozen=True)
class Bundle:
    """Values that one task (or the arguments of one submesh) sends together to one submesh.

    Attributes:
      name: For errors: what goes where.
      source: The submesh that has the values.
      target: The submesh that needs them.
      task: Index of the task that computes them; None for step arguments.
      vars: The values.
      microbatches: The microbatches for which they cross.
    """

    name: str
    source: int
    target: int
    task: int | None
    vars: tuple[core.Var, ...]
    microbatches: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of one instance of the bundle in bytes, replicas not counted."""
        return sum(var.aval.size * getattr(var.aval.dtype, "itemsize", 8) for var in self.vars)


@dataclass(frozen=True)
class Plan:
    """What every rank must agree on before the first step.

    Attributes:
      cut: The step, cut into tasks.
      graph: The tasks as the schedule sees them.
      schedule: The order of actions on each submesh, in text form.
      timeline: What the simulation predicts; its total order is the order of the step.
      bundles: What crosses submeshes.
      sizes: The rows of each microbatch in one share.
      variants: The cut for each size; the first is `cut` itself.
    """

    cut: CutStep
    graph: TaskGraph
    schedule: str
    timeline: Timeline
    bundles: tuple[Bundle, ...]
    sizes: tuple[int, ...]
    variants: tuple[Variant, ...]

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        """The tasks of the step."""
        return self.cut.tasks

    def variant_of(self, microbatch: int) -> int:
        """The position in `variants` of what a microbatch runs."""
        return int(self.sizes[microbatch] != self.sizes[0])

    def predict(self, seconds: Mapping[str, float]) -> Timeline:
        """Simulates the schedule with measured task times and messages that take no time.

        Args:
          seconds: The time of each task, by name.

        Returns:
          The timeline; its makespan is the shortest step that these tasks allow in this order.
        """
        tasks = tuple(replace(task, cost=seconds[task.name]) for task in self.graph.tasks)
        graph = replace(self.graph, tasks=tasks)
        return simulate(graph, parse_schedule(graph, self.schedule))

    def section(self, bundle: Bundle) -> str:
        """Where a bundle is made: "arguments", "before", "loop" or "after"."""
        return "arguments" if bundle.task is None else self.tasks[bundle.task].section


def make_plan(
    cut: CutStep,
    schedule: str = "1f1b",
    sizes: Sequence[int] | None = None,
    variants: Sequence[Variant] = (),
) -> Plan:
    """Schedules a cut step and finds what crosses submeshes.

    Args:
      cut: The step.
      schedule: Name of a schedule builder, or a custom schedule as text.
      sizes: The rows of each microbatch in one share; by default one each.
      variants: The cuts for microbatches of other sizes than the first.

    Returns:
      The plan, checked by simulation.

    Raises:
      UsageError: There is no such schedule.
    """
    flow = Flow(cut)
    graph = _task_graph(cut, flow)
    order = build(graph, schedule, _aliases(cut))
    timeline = validate(graph, order)
    bundles = _bundles(cut, flow)
    sizes = tuple(sizes or (1,) * cut.step.microbatches)
    everything = (Variant(cut, sizes[0], {}), *variants)
    return Plan(cut, graph, format_schedule(graph, order), timeline, bundles, sizes, everything)


class Flow:
    """Where each value comes from."""

    def __init__(self, cut: CutStep):
        step = cut.step
        self.cut = cut
        self.last = step.microbatches - 1
        self.inner = {carry.inner: carry for carry in step.carries}
        self.final = {carry.final: carry for carry in step.carries}
        self.sliced = {entry.inner for entry in step.slices}
        self.stacked = {entry.whole: entry.inner for entry in step.stacked}
        self.looped = {var for node in step.loop for var in node.outputs}
        self.makers: defaultdict[core.Var, dict[int, int]] = defaultdict(dict)
        for index, task in enumerate(cut.tasks):
            for var in task.outputs:
                self.makers[var].setdefault(task.submesh, index)

    def instance(self, var: core.Var, microbatch: int) -> Instance:
        """What a name in the program means for one microbatch: sees through carries."""
        while True:
            if var in self.final:
                var, microbatch = self.final[var].update, self.last
            elif var in self.inner:
                carry = self.inner[var]
                if microbatch == 0:
                    var = carry.initial
                else:
                    var, microbatch = carry.update, microbatch - 1
            else:
                per_microbatch = var in self.looped or var in self.sliced
                return Instance(var, microbatch if per_microbatch else 0)

    def places(self, var: core.Var) -> Iterable[int]:
        """The submeshes where a value is without being sent."""
        if var in self.sliced:
            return range(len(self.cut.submeshes))  # the batch is placed where it is read
        if var in self.cut.homes:
            home = self.cut.homes[var]
            return range(len(self.cut.submeshes)) if home is None else (home,)
        return self.makers[var]

    def reads(self, task: int) -> Iterable[tuple[int, Instance]]:
        """Every (microbatch, instance) that a task reads."""
        spec = self.cut.tasks[task]
        for microbatch in range(self.last + 1 if spec.section == "loop" else 1):
            for var in spec.inputs:
                yield microbatch, self.instance(var, microbatch)

    def results(self) -> Iterable[tuple[Instance, int]]:
        """Every (instance, submesh) that the caller gets."""
        everywhere = range(len(self.cut.submeshes))
        for result, place in self.cut.results.items():
            if result in self.stacked or result in self.cut.homes:
                continue
            instance = self.instance(result, self.last)
            for submesh in everywhere if place is None else (place,):
                yield instance, submesh


def _task_graph(cut: CutStep, flow: Flow) -> TaskGraph:
    tasks = tuple(
        ScheduledTask(
            task.name,
            task.submesh,
            backward=task.phase in ("backward", "both"),
            merged=task.phase == "both",
            repeats=task.section == "loop",
            cost=_COSTS[task.phase],
        )
        for task in cut.tasks
    )
    edges: dict[tuple[int, int, bool], None] = {}
    for index, task in enumerate(cut.tasks):
        for var in task.inputs:
            for source, carried in _sources(var, flow):
                if source != index or carried:
                    edges[source, index, carried] = None
    resources = tuple(frozenset(place.processes) for place in cut.submeshes)
    dependencies = tuple(Dependency(*edge) for edge in edges)
    return TaskGraph(tasks, dependencies, resources, cut.step.microbatches)


def _aliases(cut: CutStep) -> dict[str, int]:
    """The name of each registered task that only one task of the loop has a part of."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for index, task in enumerate(cut.tasks):
        for node in task.nodes:
            if task.section == "loop" and node.label is not None:
                found[node.label.name].add(index)
    return {name: next(iter(tasks)) for name, tasks in found.items() if len(tasks) == 1}


# Relative costs: a backward pass is two products for each one of the forward pass.
_COSTS = {"forward": 1.0, "backward": 2.0, "both": 3.0, "once": 0.1}


def _sources(var: core.Var, flow: Flow) -> Iterable[tuple[int, bool]]:
    """The tasks that a reader waits for, each with whether in the microbatch before."""
    if var in flow.inner:
        carry = flow.inner[var]
        for source, _ in _sources(carry.initial, flow):
            yield source, False
        for source, _ in _sources(carry.update, flow):
            yield source, True
    elif var in flow.final:
        yield from _sources(flow.final[var].update, flow)
    else:
        for source in flow.makers.get(var, {}).values():
            yield source, False


def _bundles(cut: CutStep, flow: Flow) -> tuple[Bundle, ...]:
    """Finds the instances that must be copied, and bundles those that go together."""
    needed: dict[tuple[core.Var, int], dict[int, None]] = defaultdict(dict)
    wants = [
        (instance, cut.tasks[index].submesh)
        for index in range(len(cut.tasks))
        for _, instance in flow.reads(index)
    ]
    for instance, submesh in [*wants, *flow.results()]:
        if submesh not in flow.places(instance.var):
            needed[instance.var, submesh][instance.microbatch] = None
    groups: dict[tuple, list[core.Var]] = defaultdict(list)
    for (var, target), microbatches in needed.items():
        source = min(flow.places(var))
        task = flow.makers[var][source] if var in flow.makers else None
        groups[source, target, task, tuple(sorted(microbatches))].append(var)
    return tuple(
        Bundle(_describe(cut, source, target, task, found), source, target, task, tuple(found), ks)
        for (source, target, task, ks), found in groups.items()
    )


def _describe(cut: CutStep, source: int, target: int, task: int | None, found) -> str:
    what = ", ".join(var.aval.str_short() for var in found[:4]) + ", ..." * (len(found) > 4)
    maker = "arguments" if task is None else cut.tasks[task].name
    return f"{maker} (submesh {source}) -> submesh {target}: {what}"
