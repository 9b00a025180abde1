"""Simulated devices, on which a schedule is made and on which it is tried.

Both are one event simulation. Time jumps from one end of an action to the next; there, every
submesh whose devices are free starts the best of its candidates whose dependencies have arrived.
Making a schedule (`builders`) offers each task's next microbatch; trying one (`simulate`) offers
only the head of each submesh's list.

Limits and candidates are wishes: when every device is idle and only a wish keeps the work from
going on, the best ready action starts all the same, so nothing but the dependencies (and, when
trying a schedule, its lists) can deadlock.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from multimesh.errors import ScheduleError
from multimesh.schedule.graph import Dependency, TaskGraph
from multimesh.schedule.order import Action, action_text, actions_text
from multimesh.schedule.policy import find_holders

__all__ = ["Candidates", "Machine"]

_FINISH, _ARRIVAL = range(2)


# candidates(machine, submesh, strict): the actions that may come next on a submesh, ready or not.
# With `strict` false it must leave out only what can never come next.
Candidates = Callable[["Machine", int, bool], Sequence[Action]]


class Machine:
    """One run of a task graph on simulated devices.

    Attributes:
      start: When each action started.
      finish: When each action that started finishes.
      order: The actions in the order in which they started; at one instant, first those that could
        start first, then by submesh.
      started: Per task, how many of its microbatches have started.
      position: Per submesh, how many actions have started.
      peak_live: Per task, the most microbatches that were live at once.
    """

    def __init__(self, graph: TaskGraph, ranks: Sequence[int], limits: Mapping[int, int]):
        """Prepares the devices; nothing runs yet.

        Args:
          graph: What runs.
          ranks: Per task, its priority class.
          limits: For some tasks, how many of its microbatches may be live at once.
        """
        count = len(graph.tasks)
        self.graph = graph
        self.start: dict[Action, float] = {}
        self.finish: dict[Action, float] = {}
        self.order: list[Action] = []
        self.started = [0] * count
        self.position = [0] * len(graph.resources)
        self.peak_live = [0] * count
        self._ranks = ranks
        self._limits = [limits.get(task, math.inf) for task in range(count)]
        self._live = [0] * count
        self._now = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        self._woken = set(range(len(graph.resources)))  # submeshes to look at before time goes on
        self._occupied = [0] * len(graph.resources)  # running actions that share a device with it
        self._overlapping = [
            [other for other, devices in enumerate(graph.resources) if devices & own]
            for own in graph.resources
        ]
        self._link_dependencies()
        self._link_holders()

    def run(self, candidates: Candidates) -> None:
        """Runs every action.

        Args:
          candidates: What may come next on a submesh.

        Raises:
          ScheduleError: Actions wait for one another; the message names them.
        """
        total = sum(map(self.graph.runs, range(len(self.graph.tasks))))
        while len(self.order) < total:
            if self._woken:
                self._start_round(candidates)
            elif self._events:
                self._advance()
            else:
                self._force(candidates)

    def _start_round(self, candidates):
        """Starts what can start at this instant on the submeshes where something changed."""
        woken, self._woken = self._woken, set()
        offers = (self._best(candidates, submesh) for submesh in woken)
        started = []
        for offer in sorted(offer for offer in offers if offer):
            _, microbatch, task = offer
            submesh = self.graph.tasks[task].submesh
            if not self._occupied[submesh]:  # by an offer before this one
                action = Action(task, microbatch)
                self._start(action, submesh)
                started.append((submesh, action))
        self.order.extend(action for _, action in sorted(started))

    def _best(self, candidates, submesh, strict=True):
        """The (rank, microbatch, task) of the best action that can start now, or None."""
        if self._occupied[submesh]:
            return None
        return min(
            (
                (self._ranks[task], microbatch, task)
                for task, microbatch in candidates(self, submesh, strict)
                if not self._pending[task][microbatch]
                and (not strict or self._live[task] < self._limits[task])
            ),
            default=None,
        )

    def _start(self, action, submesh):
        task, microbatch = action
        self.start[action] = self._now
        self.finish[action] = end = self._now + self.graph.tasks[task].cost
        heapq.heappush(self._events, (end, _FINISH, task, microbatch))
        for other in self._overlapping[submesh]:
            self._occupied[other] += 1
        self.started[task] += 1
        self.position[submesh] += 1
        self._live[task] += 1
        self.peak_live[task] = max(self.peak_live[task], self._live[task])
        self._let_go(self._let_go_on_start[task], microbatch)

    def _advance(self):
        """Moves on to the next instant at which something finishes or arrives."""
        events = self._events
        self._now = events[0][0]
        while events and events[0][0] == self._now:
            _, kind, index, microbatch = heapq.heappop(events)
            if kind == _FINISH:
                self._finish(index, microbatch)
            else:
                self._arrive(self.graph.dependencies[index], microbatch)

    def _finish(self, task, microbatch):
        for other in self._overlapping[self.graph.tasks[task].submesh]:
            self._occupied[other] -= 1
            self._woken.add(other)
        self._let_go(self._let_go_on_finish[task], microbatch)
        for index, dependency in self._outgoing[task]:
            if dependency.delay:
                arrival = self._now + dependency.delay
                heapq.heappush(self._events, (arrival, _ARRIVAL, index, microbatch))
            else:
                self._arrive(dependency, microbatch)

    def _arrive(self, dependency, microbatch):
        pending = self._pending[dependency.target]
        for waiting in self.graph.successors(dependency, microbatch):
            pending[waiting] -= 1
        self._woken.add(self.graph.tasks[dependency.target].submesh)

    def _let_go(self, held, microbatch):
        for task in held:
            self._holding[task][microbatch] -= 1
            if not self._holding[task][microbatch]:
                self._live[task] -= 1
                self._woken.add(self.graph.tasks[task].submesh)

    def _force(self, candidates):
        """Starts the best action that only a wish holds back; all devices are idle."""
        submeshes = range(len(self.graph.resources))
        offers = [self._best(candidates, submesh, strict=False) for submesh in submeshes]
        offers = [offer for offer in offers if offer]
        if not offers:
            raise ScheduleError(self._explain_deadlock(candidates))
        _, microbatch, task = min(offers)
        action = Action(task, microbatch)
        self._start(action, self.graph.tasks[task].submesh)
        self.order.append(action)

    def _explain_deadlock(self, candidates):
        lines = []
        for submesh in range(len(self.graph.resources)):
            for action in candidates(self, submesh, False):
                waits = actions_text(self.graph, self._unfinished(action))
                lines.append(f"  submesh {submesh}: {action_text(self.graph, action)} for {waits}")
        return (
            "Actions must not wait for one another in a circle. After "
            f"{len(self.order)} actions, these wait:\n" + "\n".join(lines) + "\n"
            "Reorder the schedule, or remove a dependency."
        )

    def _unfinished(self, action):
        for dependency in self.graph.dependencies:
            if dependency.target == action.task:
                for microbatch in range(self.graph.runs(dependency.source)):
                    source = Action(dependency.source, microbatch)
                    waiting = self.graph.successors(dependency, microbatch)
                    if action.microbatch in waiting and source not in self.finish:
                        yield source

    def _link_dependencies(self):
        graph = self.graph
        self._pending = [[0] * graph.runs(task) for task in range(len(graph.tasks))]
        self._outgoing: list[list[tuple[int, Dependency]]] = [[] for _ in graph.tasks]
        for index, dependency in enumerate(graph.dependencies):
            self._outgoing[dependency.source].append((index, dependency))
            pending = self._pending[dependency.target]
            for microbatch in range(graph.runs(dependency.source)):
                for waiting in graph.successors(dependency, microbatch):
                    pending[waiting] += 1

    def _link_holders(self):
        graph = self.graph
        holders = find_holders(graph)
        self._holding = []  # per task and microbatch, how many tasks still hold it
        self._let_go_on_finish: list[list[int]] = [[] for _ in graph.tasks]
        self._let_go_on_start: list[list[int]] = [[] for _ in graph.tasks]
        for task in range(len(graph.tasks)):
            count = len(holders.local[task]) + len(holders.remote[task])
            self._holding.append([count] * graph.runs(task))
            for holder in holders.local[task]:
                self._let_go_on_finish[holder].append(task)
            for holder in holders.remote[task]:
                self._let_go_on_start[holder].append(task)
