"""Any acyclic task graph is scheduled to the end, deterministically, and in a consistent order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from multimesh.schedule import (
    Dependency,
    ScheduledTask,
    TaskGraph,
    build,
    caps,
    format_schedule,
    parse_schedule,
    validate,
)

COSTS = st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, 3.0])
RESOURCES = st.lists(
    st.frozensets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4
)


@st.composite
def task_graphs(draw):
    """Once-tasks, then forward and backward tasks, then once-tasks, with random edges onwards."""
    resources = tuple(draw(RESOURCES))
    submeshes = st.integers(0, len(resources) - 1)
    tasks = [
        ScheduledTask(
            f"{'PFGBU'[kind]}{index}",
            draw(submeshes),
            backward=kind in (2, 3),
            merged=kind == 2,
            repeats=kind in (1, 2, 3),
            cost=draw(COSTS),
        )
        for index, kind in enumerate(sorted(draw(st.lists(st.integers(0, 4), max_size=9))))
    ]
    repeating = [index for index, task in enumerate(tasks) if task.repeats]
    edges = []
    if len(tasks) > 1:
        pairs = st.lists(st.integers(0, len(tasks) - 1), min_size=2, max_size=2, unique=True)
        for pair in draw(st.lists(pairs, max_size=16)):
            edges.append(Dependency(min(pair), max(pair), delay=draw(COSTS)))
    if repeating:
        ends = st.sampled_from(repeating)
        for source, target in draw(st.lists(st.tuples(ends, ends), max_size=5)):
            edges.append(Dependency(source, target, carried=True))
    return TaskGraph(tuple(tasks), tuple(edges), resources, draw(st.integers(1, 6)))


@settings(deadline=None, max_examples=150)
@given(graph=task_graphs(), name=st.sampled_from(["1f1b", "gpipe"]))
def test_any_graph_finishes_in_a_consistent_order(graphs, graph, name):
    schedule = build(graph, name)
    timeline = validate(graph, schedule)
    if graph.tasks:
        graphs.check_run(graph, schedule, timeline)
    assert build(graph, name) == schedule
    assert parse_schedule(graph, format_schedule(graph, schedule)) == schedule


@settings(deadline=None, max_examples=100)
@given(graph=task_graphs())
def test_1f1b_keeps_every_forward_task_within_its_cap(graphs, graph):
    # No graph here needs to exceed one: nothing that runs once stands inside the loop.
    peak_live = validate(graph, build(graph)).peak_live
    assert all(peak_live[task] <= cap for task, cap in caps(graph).items())
