"""A schedule as data: per submesh, which action follows which.

The text form has one line per submesh; "2F0" is microbatch 2 of task F0, a task that runs once per
step stands by its name alone, and "-" is a submesh that runs nothing:

    0F0 1F0 0B0 1B0 U0
    0F1B1 1F1B1 U1
"""

import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from multimesh.errors import ScheduleError
from multimesh.schedule.graph import TaskGraph

__all__ = ["Action", "Schedule", "action_text", "actions_text", "format_schedule", "parse_schedule"]


# A tuple rather than a dataclass: a step has tens of thousands, and they are keys of dicts.
class Action(NamedTuple):
    """One run of a task.

    Attributes:
      task: Index into `TaskGraph.tasks`.
      microbatch: Which microbatch; 0 for a task that runs once per step.
    """

    task: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """The order of the actions on each submesh.

    Attributes:
      actions: Per submesh, its actions in order.
    """

    actions: tuple[tuple[Action, ...], ...]


def action_text(graph: TaskGraph, action: Action) -> str:
    """The text of one action: "2F0", or "U0" for a task that runs once per step."""
    if not 0 <= action.task < len(graph.tasks):
        return repr(action)
    task = graph.tasks[action.task]
    return f"{action.microbatch}{task.name}" if task.repeats else task.name


def actions_text(graph: TaskGraph, actions: Iterable[Action], most: int = 8) -> str:
    """The text of some actions for a message: "0F0, 1F0, ...", or "none"."""
    texts = [action_text(graph, action) for action in actions]
    return ", ".join(texts[:most] + ["..."] * (len(texts) > most)) or "none"


def format_schedule(graph: TaskGraph, schedule: Schedule) -> str:
    """Writes a schedule as text, one line per submesh."""
    lines = (" ".join(action_text(graph, a) for a in actions) for actions in schedule.actions)
    return "\n".join(line or "-" for line in lines)


def parse_schedule(graph: TaskGraph, text: str) -> Schedule:
    """Reads what `format_schedule` wrote, or a person. Blank lines do not count.

    Raises:
      ScheduleError: A word is no action of this graph, or the lines are not one per submesh.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != len(graph.resources):
        raise ScheduleError(
            f"A schedule must have one line per submesh, {len(graph.resources)} in all. "
            f'Got {len(lines)}; write "-" for a submesh that runs nothing.'
        )
    tasks = {task.name: index for index, task in enumerate(graph.tasks)}
    return Schedule(
        tuple(
            () if words == ["-"] else tuple(_parse_action(graph, tasks, word) for word in words)
            for words in lines
        )
    )


def _parse_action(graph, tasks, word):
    name = word.lstrip(string.digits)
    digits = word[: len(word) - len(name)]
    if name not in tasks:
        raise ScheduleError(f"{word!r} must name one of the tasks {', '.join(tasks)}.")
    if graph.tasks[tasks[name]].repeats != bool(digits):
        raise ScheduleError(
            f"{word!r} must be a microbatch and a task that runs once per microbatch, as in 0F0, "
            "or the bare name of a task that runs once per step."
        )
    return Action(tasks[name], int(digits or 0))
