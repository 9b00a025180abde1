"""What is scheduled: tasks, what they wait for, and the devices they occupy.

A `TaskGraph` is all that a schedule depends on. It knows nothing of JAX: the partition of a traced
step is reduced to one, and a test can write one by hand.

A task runs once per microbatch, or once per step (parameter copies before the microbatch loop, the
optimizer after it). One run of a task is an *action*. `TaskGraph.successors` is the only place that
says which actions a dependency ties together.
"""

import graphlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from multimesh.errors import ScheduleError

__all__ = ["Dependency", "ScheduledTask", "TaskGraph"]


@dataclass(frozen=True)
class ScheduledTask:
    """A piece of the step that runs on one submesh without waiting for another.

    Attributes:
      name: "F0", "F1B1", "U0.1": unique, without spaces, not starting with a digit.
      submesh: Index into `TaskGraph.resources`.
      backward: Whether the task computes cotangents.
      merged: Whether a backward task begins with the forward of its stage (the last stage of a
        chain): it is backward for priorities and forward for in-flight caps.
      repeats: True: once per microbatch. False: once per step.
      cost: Predicted time of one run, in any unit.
    """

    name: str
    submesh: int
    backward: bool = False
    merged: bool = False
    repeats: bool = True
    cost: float = 1.0

    @property
    def forward(self) -> bool:
        """Whether the task is part of the forward phase."""
        return self.merged or not self.backward


@dataclass(frozen=True)
class Dependency:
    """One task waits for another.

    Between repeating tasks, microbatch k waits for microbatch k. Every microbatch waits for a task
    that runs once, and a task that runs once waits for every microbatch.

    Attributes:
      source: Index of the task that must finish.
      target: Index of the task that waits.
      carried: Microbatch k + 1 of the target waits for microbatch k of the source: mutable state
        and accumulators. A task may depend on itself this way.
      delay: Predicted time from the end of the source until the target has its value.
    """

    source: int
    target: int
    carried: bool = False
    delay: float = 0.0


@dataclass(frozen=True)
class TaskGraph:
    """Everything that a schedule is made from.

    Attributes:
      tasks: The tasks; everything else refers to them by index.
      dependencies: What waits for what.
      resources: Per submesh, the devices (or ranks) it occupies. Submeshes that share one never
        run at the same time.
      microbatches: How often a repeating task runs, at least 1.

    Raises:
      ScheduleError: An index, name or number is out of range, or tasks of the same microbatch wait
        for one another in a circle.
    """

    tasks: tuple[ScheduledTask, ...]
    dependencies: tuple[Dependency, ...]
    resources: tuple[frozenset[int], ...]
    microbatches: int

    def __post_init__(self):
        if self.microbatches < 1:
            raise ScheduleError(f"microbatches must be at least 1. Got {self.microbatches}.")
        for submesh, resources in enumerate(self.resources):
            if not resources:
                raise ScheduleError(f"Submesh {submesh} must occupy a device. Got none.")
        self._check_tasks()
        for dependency in self.dependencies:
            self._check_dependency(dependency)
        self.topological_order()

    def runs(self, task: int) -> int:
        """How often a task runs in one step."""
        return self.microbatches if self.tasks[task].repeats else 1

    def successors(self, dependency: Dependency, microbatch: int) -> Sequence[int]:
        """The microbatches of the target that wait for one microbatch of the source."""
        if not self.tasks[dependency.target].repeats:
            return (0,)
        if not self.tasks[dependency.source].repeats:
            return range(self.microbatches)
        waiting = microbatch + dependency.carried
        return (waiting,) if waiting < self.microbatches else ()

    def topological_order(self) -> tuple[int, ...]:
        """The tasks, each after those it waits for within its microbatch.

        Raises:
          ScheduleError: There is no such order.
        """
        sorter = graphlib.TopologicalSorter({task: [] for task in range(len(self.tasks))})
        for dependency in self.dependencies:
            if not dependency.carried:
                sorter.add(dependency.target, dependency.source)
        try:
            return tuple(sorter.static_order())
        except graphlib.CycleError as exc:
            circle = " -> ".join(self.tasks[task].name for task in exc.args[1])
            raise ScheduleError(
                f"Tasks of one microbatch must not wait for one another in a circle. Got {circle}; "
                "one of these dependencies must be removed, or be carried to the next microbatch."
            ) from exc

    def _check_tasks(self):
        repeated = [n for n, count in Counter(t.name for t in self.tasks).items() if count > 1]
        if repeated:
            raise ScheduleError(f"Task names must be unique. Got {repeated!r} more than once.")
        for task in self.tasks:
            if task.name.split() != [task.name] or task.name[0].isdigit():
                raise ScheduleError(
                    f"A task name must have no spaces and not start with a digit. Got {task.name!r}"
                )
            if not 0 <= task.submesh < len(self.resources):
                raise ScheduleError(
                    f"The submesh of task {task.name} must be one of the {len(self.resources)} in "
                    f"resources. Got {task.submesh}."
                )
            if task.merged and not task.backward:
                raise ScheduleError(f"Task {task.name} is merged, so it must be backward too.")
            if not 0 <= task.cost < float("inf"):
                raise ScheduleError(
                    f"The cost of task {task.name} must be finite and not negative. "
                    f"Got {task.cost}."
                )

    def _check_dependency(self, dependency):
        ends = (dependency.source, dependency.target)
        if not all(0 <= task < len(self.tasks) for task in ends):
            raise ScheduleError(
                f"A dependency must join two of the {len(self.tasks)} tasks. Got {dependency}."
            )
        source, target = (self.tasks[task] for task in ends)
        if dependency.carried and not (source.repeats and target.repeats):
            raise ScheduleError(
                "A carried dependency must join two tasks that run once per microbatch. "
                f"Got {source.name} -> {target.name}."
            )
        if not 0 <= dependency.delay < float("inf"):
            raise ScheduleError(
                f"The delay of {source.name} -> {target.name} must be finite and not negative. "
                f"Got {dependency.delay}."
            )
