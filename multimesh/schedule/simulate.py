"""Tries a schedule on simulated devices before anything is compiled.

It must finish, run each action once and respect the dependencies. The simulation also fixes the one
total order that every rank's instructions are a projection of, and predicts the bubble and the
memory.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

from multimesh.errors import ScheduleError
from multimesh.schedule.graph import TaskGraph
from multimesh.schedule.machine import Machine
from multimesh.schedule.order import Action, Schedule, action_text, actions_text
from multimesh.schedule.policy import ranks, send_windows

__all__ = ["Timeline", "simulate", "validate"]


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs, in the unit of the task costs.

    Attributes:
      start: When each action starts.
      finish: When each action finishes.
      makespan: When the last one finishes.
      bubble_fraction: The share of device time that is idle, from 0 to 1.
      peak_live: Per task, the most microbatches that it had in flight at once.
      total_order: Every action by start time. Actions that start at the same instant stand so that
        none comes before one it waits for, then by submesh.
    """

    start: dict[Action, float]
    finish: dict[Action, float]
    makespan: float
    bubble_fraction: float
    peak_live: tuple[int, ...]
    total_order: tuple[Action, ...]


def simulate(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Runs a schedule on simulated devices.

    Each submesh runs its list in order, each action as soon as its dependencies have arrived and
    its devices are free. Of two submeshes that compete for a device, the backward action goes
    first, then the lower microbatch.

    Args:
      graph: What the schedule is for.
      schedule: Any schedule, also one that no builder made.

    Returns:
      What happens when.

    Raises:
      ScheduleError: The schedule lacks or repeats actions, has one on the wrong submesh, or
        deadlocks; the message names the actions, and what they wait for.
    """
    _check_complete(graph, schedule)

    def head(machine, submesh, strict):
        position = machine.position[submesh]
        return schedule.actions[submesh][position : position + 1]

    machine = Machine(graph, ranks(graph), send_windows(graph))
    machine.run(head)
    makespan = max(machine.finish.values(), default=0.0)
    return Timeline(
        start=machine.start,
        finish=machine.finish,
        makespan=makespan,
        bubble_fraction=_bubble_fraction(graph, makespan),
        peak_live=tuple(machine.peak_live),
        total_order=tuple(machine.order),
    )


def validate(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Simulates a schedule, and checks the outcome independently of the simulator.

    Args:
      graph: What the schedule is for.
      schedule: The schedule to prove.

    Returns:
      What `simulate` returns; its total order has each action once, after everything that it waits
      for, and holds every submesh's actions in the order of the schedule.

    Raises:
      ScheduleError: The schedule cannot run.
    """
    timeline = simulate(graph, schedule)
    place = {action: index for index, action in enumerate(timeline.total_order)}
    pairs = [
        (Action(dependency.source, microbatch), Action(dependency.target, waiting))
        for dependency in graph.dependencies
        for microbatch in range(graph.runs(dependency.source))
        for waiting in graph.successors(dependency, microbatch)
    ]
    for actions in schedule.actions:
        pairs.extend(itertools.pairwise(actions))
    for before, after in pairs:
        if place[before] >= place[after]:
            raise ScheduleError(
                f"{action_text(graph, before)} must come before {action_text(graph, after)} in the "
                "total order. Got them the other way round: a bug of the simulator, please report."
            )
    return timeline


def _check_complete(graph, schedule):
    if len(schedule.actions) != len(graph.resources):
        raise ScheduleError(
            f"A schedule must have one list per submesh, {len(graph.resources)} in all. "
            f"Got {len(schedule.actions)}."
        )
    expected: list[set[Action]] = [set() for _ in graph.resources]
    for index, task in enumerate(graph.tasks):
        expected[task.submesh].update(Action(index, k) for k in range(graph.runs(index)))
    for submesh, actions in enumerate(schedule.actions):
        missing = expected[submesh] - set(actions)
        surplus = Counter(actions) - Counter(expected[submesh])
        if missing or surplus:
            raise ScheduleError(
                f"Submesh {submesh} must run each of its actions once. "
                f"Missing: {actions_text(graph, sorted(missing))}; too many: "
                f"{actions_text(graph, sorted(surplus))}."
            )


def _bubble_fraction(graph, makespan):
    if not makespan:
        return 0.0
    busy = sum(
        task.cost * graph.runs(index) * len(graph.resources[task.submesh])
        for index, task in enumerate(graph.tasks)
    )
    return 1.0 - busy / (makespan * len(frozenset().union(*graph.resources)))
