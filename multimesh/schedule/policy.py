"""Who goes first, and how far ahead a task may run.

The numbers that steer a list schedule, each a function of the task graph alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from multimesh.schedule.graph import TaskGraph

__all__ = ["Holders", "caps", "feeding_the_loop", "find_holders", "ranks", "send_windows"]

_BEFORE_LOOP, _PREFERRED, _OTHER, _AFTER_LOOP = range(4)


@dataclass(frozen=True)
class Holders:
    """Until when a microbatch of a task counts as live.

    Attributes:
      local: Per task, the tasks whose *finish* lets go of its microbatch: the readers of its
        residuals; the task itself if nothing holds its microbatch.
      remote: Per task, the tasks whose *start* lets go of its microbatch: the receivers of a
        forward task that leaves no residuals.
    """

    local: tuple[tuple[int, ...], ...]
    remote: tuple[tuple[int, ...], ...]


def caps(graph: TaskGraph) -> dict[int, int]:
    """How many microbatches each forward task may have in flight.

    The forward tasks on the longest forward path that begins with it: p - i for stage i of a chain
    of p stages. A microbatch is in flight from the start of the task until `Holders` let go of it.

    Args:
      graph: What is scheduled.

    Returns:
      The cap, at least 1, of every task that is forward and repeats.
    """
    length = {
        index: 1
        for index in reversed(graph.topological_order())
        if graph.tasks[index].forward and graph.tasks[index].repeats
    }
    targets = _targets(graph)
    for index in length:  # consumers first
        following = [length[target] for target in targets[index] if target in length]
        length[index] += max(following, default=0)
    return length


def send_windows(graph: TaskGraph) -> dict[int, int]:
    """The caps of the tasks that only their receivers hold back.

    Nothing in the order of their own submesh keeps such tasks (a frozen stage, an evaluation) from
    running all microbatches at once, so the window holds under every schedule.
    """
    remote = find_holders(graph).remote
    return {task: cap for task, cap in caps(graph).items() if remote[task]}


def find_holders(graph: TaskGraph) -> Holders:
    """Finds which tasks hold each task's microbatches live."""
    targets = _targets(graph)
    local, remote = [], []
    for index, task in enumerate(graph.tasks):
        repeating = [t for t in targets[index] if task.repeats and graph.tasks[t].repeats]
        readers = tuple(t for t in repeating if graph.tasks[t].submesh == task.submesh)
        # What backward tasks send is bounded already: by the forward tasks that came before.
        receivers = () if readers or task.backward else tuple(repeating)
        local.append(readers or (() if receivers else (index,)))
        remote.append(receivers)
    return Holders(tuple(local), tuple(remote))


def ranks(graph: TaskGraph, prefer_backward: bool = True) -> tuple[int, ...]:
    """The priority class of each task; of two ready actions, the lower class runs first.

    Args:
      graph: What is scheduled.
      prefer_backward: Backward tasks go before forward tasks, which keeps few microbatches live;
        False: the other way round.

    Returns:
      Per task its class: work that the microbatch loop waits for, then the preferred phase, then
      the other one, then work that only waits for the loop.
    """
    feeds_loop = feeding_the_loop(graph)
    classes = []
    for index, task in enumerate(graph.tasks):
        preferred = task.backward if prefer_backward else task.forward
        if not task.repeats:
            classes.append(_BEFORE_LOOP if index in feeds_loop else _AFTER_LOOP)
        else:
            classes.append(_PREFERRED if preferred else _OTHER)
    return tuple(classes)


def feeding_the_loop(graph: TaskGraph) -> set[int]:
    """The tasks that a task of the microbatch loop waits for."""
    targets = _targets(graph)
    feeding: set[int] = set()
    for index in reversed(graph.topological_order()):
        if any(graph.tasks[t].repeats or t in feeding for t in targets[index]):
            feeding.add(index)
    return feeding


def _targets(graph) -> Mapping[int, list[int]]:
    """Per task, those that wait for it within the microbatch, each once."""
    targets: dict[int, list[int]] = {index: [] for index in range(len(graph.tasks))}
    for dependency in graph.dependencies:
        if not dependency.carried and dependency.target not in targets[dependency.source]:
            targets[dependency.source].append(dependency.target)
    return targets
