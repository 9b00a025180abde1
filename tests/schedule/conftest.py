"""Builders of small task graphs, and an oracle that shares no code with the simulator."""

import itertools
from types import SimpleNamespace

import pytest

from multimesh.schedule import Action, Dependency, ScheduledTask, TaskGraph


def make_graph(tasks, edges, microbatches=4, resources=None, carried=()):
    """A graph whose edges are pairs of task names; by default every submesh has its own device."""
    index = {task.name: i for i, task in enumerate(tasks)}
    assert len(index) == len(tasks)
    dependencies = [Dependency(index[a], index[b]) for a, b in edges]
    dependencies += [Dependency(index[a], index[b], carried=True) for a, b in carried]
    submeshes = 1 + max(task.submesh for task in tasks)
    resources = resources or [{submesh} for submesh in range(submeshes)]
    return TaskGraph(
        tuple(tasks), tuple(dependencies), tuple(map(frozenset, resources)), microbatches
    )


def make_chain(stages, microbatches, forward=1.0, backward=1.0):
    """F0 ... F(p-1)B(p-1) ... B0 with accumulators, each stage on its own device."""
    last = stages - 1
    tasks = [ScheduledTask(f"F{i}", i, cost=forward) for i in range(last)]
    tasks.append(
        ScheduledTask(f"F{last}B{last}", last, backward=True, merged=True, cost=forward + backward)
    )
    tasks += [
        ScheduledTask(f"B{i}", i, backward=True, cost=backward) for i in reversed(range(last))
    ]
    names = [task.name for task in tasks]
    edges = list(itertools.pairwise(names))
    edges += [(f"F{i}", f"B{i}") for i in range(last)]
    carried = [(name, name) for name in names[last:]]
    return make_graph(tasks, edges, microbatches, carried=carried)


def ordered_pairs(graph):
    """Every (before, after) that the dependencies ask for, written from their definition."""
    every = range(graph.microbatches)
    for edge in graph.dependencies:
        source, target = graph.tasks[edge.source], graph.tasks[edge.target]
        for k in every if source.repeats else [0]:
            for j in every if target.repeats else [0]:
                both = source.repeats and target.repeats
                if not both or j == k + edge.carried:
                    yield Action(edge.source, k), Action(edge.target, j), edge.delay


def check_run(graph, schedule, timeline):
    """Asserts that a simulated schedule is complete, ordered, and never uses a device twice."""
    expected = {
        Action(i, k)
        for i, task in enumerate(graph.tasks)
        for k in range(graph.microbatches if task.repeats else 1)
    }
    order = timeline.total_order
    assert len(order) == len(expected) and set(order) == expected
    place = {action: i for i, action in enumerate(order)}
    start, finish = timeline.start, timeline.finish
    for before, after, delay in ordered_pairs(graph):
        assert place[before] < place[after]
        assert finish[before] + delay <= start[after]
    assert [start[action] for action in order] == sorted(start.values())
    for submesh, actions in enumerate(schedule.actions):
        assert [a for a in order if graph.tasks[a.task].submesh == submesh] == list(actions)
    for device in set().union(*graph.resources):
        users = [a for a in order if device in graph.resources[graph.tasks[a.task].submesh]]
        for before, after in itertools.pairwise(users):
            assert finish[before] <= start[after]
    assert timeline.makespan == max(finish.values())


@pytest.fixture(scope="session")
def graphs():
    return SimpleNamespace(make=make_graph, chain=make_chain, check_run=check_run)
