"""What the simulator says of schedules that somebody else made."""

import re

import pytest

from multimesh.errors import ScheduleError, UsageError
from multimesh.schedule import (
    Action,
    Dependency,
    Schedule,
    ScheduledTask,
    TaskGraph,
    build,
    format_schedule,
    parse_schedule,
    simulate,
    validate,
)


def test_a_hand_written_schedule_is_timed(graphs):
    graph = graphs.chain(2, 2, forward=1, backward=2)
    timeline = validate(graph, parse_schedule(graph, "0F0 0B0 1F0 1B0 \n 0F1B1 1F1B1"))
    forward, last, backward = range(3)
    assert timeline.start == {
        Action(forward, 0): 0,
        Action(last, 0): 1,
        Action(backward, 0): 4,
        Action(forward, 1): 6,
        Action(last, 1): 7,
        Action(backward, 1): 10,
    }
    assert timeline.makespan == 12
    assert timeline.bubble_fraction == pytest.approx(0.5)
    assert timeline.peak_live == (1, 1, 1)
    assert timeline.total_order == tuple(sorted(timeline.start, key=timeline.start.get))


def test_a_delay_on_the_way_is_waited_for(graphs):
    tasks = (ScheduledTask("F0", 0), ScheduledTask("F1", 1))
    graph = TaskGraph(tasks, (Dependency(0, 1, delay=0.25),), (frozenset({0}), frozenset({1})), 2)
    schedule = build(graph)
    timeline = validate(graph, schedule)
    graphs.check_run(graph, schedule, timeline)
    assert [timeline.start[1, k] for k in range(2)] == [1.25, 2.25]


def test_a_deadlock_names_who_waits_for_what(graphs):
    graph = graphs.chain(2, 2)
    schedule = parse_schedule(graph, "0F0 0B0 1F0 1B0 \n 1F1B1 0F1B1")
    with pytest.raises(ScheduleError) as caught:
        simulate(graph, schedule)
    assert "After 1 actions" in str(caught.value)
    assert "submesh 0: 0B0 for 0F1B1\n" in str(caught.value)
    assert "submesh 1: 1F1B1 for 1F0, 0F1B1\n" in str(caught.value)


def test_a_graph_that_no_order_can_run_is_refused(graphs):
    # S waits for every F, but F(1) waits for B(0), which waits for S.
    tasks = [ScheduledTask("F", 0), ScheduledTask("S", 0, repeats=False), ScheduledTask("B", 0)]
    graph = graphs.make(tasks, [("F", "S"), ("S", "B")], 2, carried=[("B", "F")])
    with pytest.raises(ScheduleError, match="1F for 0B"):
        build(graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 1B0 \n 0F1B1 1F1B1", "Submesh 0 .* Missing: 1F0; too many: none"),
        ("0F0 0F0 1F0 0B0 1B0 \n 0F1B1 1F1B1", "Missing: none; too many: 0F0"),
        ("0F0 1F0 0B0 1B0 1F1B1 \n 0F1B1", "Submesh 0 .* too many: 1F1B1"),
        ("0F0 1F0 0B0 1B0 2B0 \n 0F1B1 1F1B1", "too many: 2B0"),
    ],
)
def test_missing_and_surplus_actions_are_named(graphs, text, message):
    graph = graphs.chain(2, 2)
    with pytest.raises(ScheduleError, match=message):
        simulate(graph, parse_schedule(graph, text))


def test_a_schedule_for_other_submeshes_is_refused(graphs):
    graph = graphs.chain(2, 2)
    with pytest.raises(ScheduleError, match=r"2 in all\. Got 1"):
        simulate(graph, Schedule(((),)))
    with pytest.raises(ScheduleError, match=r"too many: Action\(task=9, microbatch=0\)"):
        simulate(graph, Schedule(((Action(9, 0),), ())))


def test_an_unknown_builder_lists_the_known_ones(graphs):
    with pytest.raises(UsageError, match=re.escape("one of 1f1b, gpipe, wavefront. Got '1b1f'")):
        build(graphs.chain(2, 2), "1b1f")


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "wavefront"])
def test_text_round_trips(graphs, name):
    tasks = [ScheduledTask("F0", 1), ScheduledTask("U0.1", 1, repeats=False)]
    for graph in graphs.chain(3, 12), graphs.make(tasks, [("F0", "U0.1")]):
        schedule = build(graph, name)
        assert parse_schedule(graph, format_schedule(graph, schedule)) == schedule


def test_text_shows_idle_submeshes_and_single_runs(graphs):
    tasks = [ScheduledTask("F0", 1), ScheduledTask("U0.1", 1, repeats=False)]
    graph = graphs.make(tasks, [("F0", "U0.1")], 2)
    assert format_schedule(graph, build(graph)) == "-\n0F0 1F0 U0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 \n 0F9", "'0F9' must name one of the tasks F0, F1B1, B0"),
        ("F0 \n -", "'F0' must be a microbatch and a task"),
        ("0F0", r"2 in all\. Got 1"),
    ],
)
def test_unreadable_text_is_explained(graphs, text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(graphs.chain(2, 2), text)


ONE_DEVICE = (frozenset({0}),)


@pytest.mark.parametrize(
    ("tasks", "dependencies", "resources", "message"),
    [
        ([ScheduledTask("F", 0)] * 2, [], ONE_DEVICE, r"unique\. Got \['F'\]"),
        ([ScheduledTask("0F", 0)], [], ONE_DEVICE, "start with a digit"),
        ([ScheduledTask("F 0", 0)], [], ONE_DEVICE, "no spaces"),
        ([ScheduledTask("", 0)], [], ONE_DEVICE, "no spaces"),
        ([ScheduledTask("F", 1)], [], ONE_DEVICE, "submesh of task F"),
        ([ScheduledTask("F", 0, merged=True)], [], ONE_DEVICE, "must be backward too"),
        ([ScheduledTask("F", 0, cost=-1.0)], [], ONE_DEVICE, "cost of task F"),
        ([ScheduledTask("F", 0, cost=float("nan"))], [], ONE_DEVICE, "cost of task F"),
        ([ScheduledTask("F", 0)], [Dependency(0, 1)], ONE_DEVICE, "join two of the 1 tasks"),
        ([ScheduledTask("F", 0)], [Dependency(0, 0)], ONE_DEVICE, "F -> F"),
        (
            [ScheduledTask("F", 0), ScheduledTask("B", 0)],
            [Dependency(0, 1), Dependency(1, 0)],
            ONE_DEVICE,
            "in a circle",
        ),
        (
            [ScheduledTask("F", 0), ScheduledTask("U", 0, repeats=False)],
            [Dependency(0, 1, carried=True)],
            ONE_DEVICE,
            "carried dependency",
        ),
        (
            [ScheduledTask("F", 0), ScheduledTask("G", 0)],
            [Dependency(0, 1, delay=-1.0)],
            ONE_DEVICE,
            "delay of F -> G",
        ),
        ([ScheduledTask("F", 0)], [], (frozenset(),), "must occupy a device"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(tasks, dependencies, resources, message):
    with pytest.raises(ScheduleError, match=message):
        TaskGraph(tuple(tasks), tuple(dependencies), resources, 2)


def test_no_microbatches_are_refused():
    with pytest.raises(ScheduleError, match="at least 1"):
        TaskGraph((), (), (), 0)
