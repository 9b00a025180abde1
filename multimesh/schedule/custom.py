"""A schedule that a user writes down: for each submesh its tasks, in order.

As text, which is what a name scope can hold: submeshes apart by "|", actions by ",", each "F0" (the
next microbatch of F0) or "2:F0" (microbatch 2).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from multimesh.errors import ScheduleError, UsageError
from multimesh.schedule.graph import TaskGraph
from multimesh.schedule.order import Action, Schedule
from multimesh.schedule.policy import feeding_the_loop

__all__ = ["CUSTOM", "build_custom", "custom_text"]

CUSTOM = "custom:"


def custom_text(table: Sequence[Sequence]) -> str:
    """Writes down a user's schedule.

    Args:
      table: For each submesh, names of tasks or pairs (microbatch, name).

    Raises:
      UsageError: It is something else.
    """
    if isinstance(table, str) or not isinstance(table, Sequence):
        raise _no_table(table)
    return CUSTOM + "|".join(",".join(map(_entry_text, _row(row))) for row in table)


def _row(row: Any) -> Sequence:
    if isinstance(row, str) or not isinstance(row, Sequence):
        raise _no_table(row)
    return row


def _entry_text(entry: Any) -> str:
    is_pair = isinstance(entry, tuple | list) and len(entry) == 2
    microbatch, name = entry if is_pair else (None, entry)
    if not isinstance(name, str) or not re.fullmatch(r"[^,|:/()\s]+", name):
        raise _no_table(entry)
    if microbatch is None:
        return name
    if isinstance(microbatch, bool) or not isinstance(microbatch, Integral) or microbatch < 0:
        raise _no_table(entry)
    return f"{microbatch}:{name}"


def _no_table(got: Any) -> UsageError:
    return UsageError(
        "custom_schedule must be a list for each submesh, of task names or of pairs (microbatch, "
        f'name), such as [["F0", "F0", "B0", "B0"], [(0, "F1B1"), (1, "F1B1")]]. Got {got!r:.80}.'
    )


def build_custom(graph: TaskGraph, text: str, aliases: Mapping[str, int]) -> Schedule:
    """Reads a user's schedule. Tasks that run once a step are added where they must be.

    Args:
      graph: What is scheduled.
      text: What `custom_text` wrote.
      aliases: Other names of tasks.

    Returns:
      The schedule; whether it can be run is for the simulation to say.

    Raises:
      ScheduleError: A name is unknown or on another submesh, or a task does not stand there once
        for each microbatch.
    """
    rows = [row.split(",") if row else [] for row in text.removeprefix(CUSTOM).split("|")]
    if len(rows) > len(graph.resources):
        raise ScheduleError(
            f"custom_schedule must have a list for each of the {len(graph.resources)} submeshes. "
            f"Got {len(rows)}."
        )
    names = {**aliases, **{task.name: index for index, task in enumerate(graph.tasks)}}
    rows += [[]] * (len(graph.resources) - len(rows))
    actions = [_actions(graph, names, row, place) for place, row in enumerate(rows)]
    _check_counts(graph, [action for row in actions for action in row])
    _check_order(graph, actions)
    once = [index for index in graph.topological_order() if not graph.tasks[index].repeats]
    feeds = feeding_the_loop(graph)
    for index in reversed([task for task in once if task in feeds]):
        actions[graph.tasks[index].submesh].insert(0, Action(index, 0))
    for index in (task for task in once if task not in feeds):
        actions[graph.tasks[index].submesh].append(Action(index, 0))
    return Schedule(tuple(map(tuple, actions)))


def _actions(graph: TaskGraph, names: Mapping[str, int], row: Sequence[str], place: int) -> list:
    seen: defaultdict[int, int] = defaultdict(int)
    actions = []
    for entry in row:
        number, _, name = entry.rpartition(":")
        if name not in names or not graph.tasks[names[name]].repeats:
            here = [task.name for task in graph.tasks if task.repeats and task.submesh == place]
            raise ScheduleError(
                f"custom_schedule names {name!r} for submesh {place}, whose tasks are "
                f"{', '.join(here) or 'none'}."
            )
        task = names[name]
        if graph.tasks[task].submesh != place:
            raise ScheduleError(
                f"custom_schedule has {name!r} in list {place}, but it runs on submesh "
                f"{graph.tasks[task].submesh}."
            )
        actions.append(Action(task, int(number) if number else seen[task]))
        seen[task] += 1
    return actions


def _check_order(graph: TaskGraph, actions: Sequence[Sequence[Action]]) -> None:
    """Checks that a task that adds to what its last run left takes the microbatches in order."""
    carried = [each for each in graph.dependencies if each.carried]
    adding = sorted(each.source for each in carried if each.source == each.target)
    for row in actions:
        for task in adding:
            order = [action.microbatch for action in row if action.task == task]
            if order != sorted(order):
                raise ScheduleError(
                    f"custom_schedule has microbatches {order} of {graph.tasks[task].name}, which "
                    "adds up results: those must be in order."
                )


def _check_counts(graph: TaskGraph, actions: Sequence[Action]) -> None:
    counts = Counter(actions)
    wrong = []
    for index, task in enumerate(graph.tasks):
        if not task.repeats:
            continue
        found = sum(count for action, count in counts.items() if action.task == index)
        expected = {Action(index, microbatch) for microbatch in range(graph.microbatches)}
        if found != graph.microbatches:
            wrong.append(f"{task.name} {found} times")
        elif any(counts[action] != 1 for action in expected):
            missing = [each.microbatch for each in expected if not counts[each]]
            wrong.append(f"{task.name} not for microbatch {', '.join(map(str, sorted(missing)))}")
    if wrong:
        raise ScheduleError(
            f"custom_schedule must have each task exactly {graph.microbatches} times, once for "
            f"each microbatch. It has {', '.join(wrong)}."
        )
