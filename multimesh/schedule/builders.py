"""Builders: from a task graph to a schedule, by name.

All are one list scheduling: whenever a submesh is free, it starts the ready action that the
builder's policy prefers, lowest microbatch first. A task runs its microbatches in order.

    1f1b    backward first, under the in-flight caps: on a chain, the textbook 1F1B
    gpipe   every forward of a submesh, then every backward
    wavefront  along the diagonals: the action whose distance from the start of the graph, plus its
            microbatch, is least
    custom  what a user wrote down
"""

from collections.abc import Mapping

from multimesh.errors import UsageError
from multimesh.schedule.custom import CUSTOM, build_custom
from multimesh.schedule.graph import TaskGraph
from multimesh.schedule.machine import Candidates, Machine
from multimesh.schedule.order import Action, Schedule
from multimesh.schedule.policy import caps, ranks, send_windows

__all__ = ["SCHEDULES", "build"]


def build(
    graph: TaskGraph, name: str = "1f1b", aliases: Mapping[str, int] | None = None
) -> Schedule:
    """Makes a schedule.

    Without backward tasks, every builder gives the plain forward pipeline.

    Args:
      graph: What is scheduled.
      name: One of `SCHEDULES`, or what `custom_text` wrote.
      aliases: Other names of tasks, for a schedule that a user wrote down.

    Returns:
      The order of the actions on each submesh. The same graph always gives the same schedule.

    Raises:
      UsageError: The name is unknown.
      ScheduleError: No schedule exists: actions wait for one another.
    """
    if name.startswith(CUSTOM):
        return build_custom(graph, name, aliases or {})
    if name not in _BUILDERS:
        raise UsageError(f"schedule must be one of {', '.join(sorted(_BUILDERS))}. Got {name!r}.")
    return _BUILDERS[name](graph)


def _build_1f1b(graph):
    return _list_schedule(graph, ranks(graph), caps(graph), _next_of_each_task(graph))


def _build_gpipe(graph):
    next_actions = _next_of_each_task(graph)

    def forwards_first(machine, submesh, strict):
        actions = next_actions(machine, submesh, strict)
        phases = [graph.tasks[action.task] for action in actions]
        if strict and any(task.forward and task.repeats for task in phases):
            pairs = zip(actions, phases, strict=True)
            return [action for action, task in pairs if task.forward or not task.repeats]
        return actions

    priorities = ranks(graph, prefer_backward=False)
    return _list_schedule(graph, priorities, send_windows(graph), forwards_first)


def _build_wavefront(graph):
    next_actions = _next_of_each_task(graph)
    level = _levels(graph)

    def diagonal(machine, submesh, strict):
        actions = next_actions(machine, submesh, strict)
        looped = [a for a in actions if graph.tasks[a.task].repeats]
        if not strict or not looped:
            return actions
        first = min(level[a.task] + a.microbatch for a in looped)
        others = [a for a in actions if a not in looped]
        return others + [a for a in looped if level[a.task] + a.microbatch == first]

    return _list_schedule(graph, ranks(graph), send_windows(graph), diagonal)


def _levels(graph) -> list[int]:
    """The length of the longest path to each task."""
    level = [0] * len(graph.tasks)
    for task in graph.topological_order():
        sources = [d.source for d in graph.dependencies if d.target == task and not d.carried]
        level[task] = max((level[source] + 1 for source in sources), default=0)
    return level


def _next_of_each_task(graph) -> Candidates:
    tasks_of: list[list[tuple[int, int]]] = [[] for _ in graph.resources]
    for index, task in enumerate(graph.tasks):
        tasks_of[task.submesh].append((index, graph.runs(index)))

    def candidates(machine, submesh, strict):
        started = machine.started
        return [Action(t, started[t]) for t, runs in tasks_of[submesh] if started[t] < runs]

    return candidates


def _list_schedule(graph, priorities, limits, candidates) -> Schedule:
    machine = Machine(graph, priorities, limits)
    machine.run(candidates)
    actions: list[list[Action]] = [[] for _ in graph.resources]
    for action in machine.order:
        actions[graph.tasks[action.task].submesh].append(action)
    return Schedule(tuple(map(tuple, actions)))


_BUILDERS: Mapping = {
    "1f1b": _build_1f1b,
    "gpipe": _build_gpipe,
    "wavefront": _build_wavefront,
}
SCHEDULES = tuple(_BUILDERS)
