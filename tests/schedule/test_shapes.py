"""Task graphs that are no plain chain: the cases where a cap per submesh would deadlock."""

import itertools

import pytest

from multimesh.schedule import ScheduledTask, build, caps, format_schedule, validate


def forward(name, submesh, **options):
    return ScheduledTask(name, submesh, **options)


def backward(name, submesh, **options):
    return ScheduledTask(name, submesh, backward=True, **options)


def merged(name, submesh, **options):
    return ScheduledTask(name, submesh, backward=True, merged=True, **options)


def once(name, submesh, **options):
    return ScheduledTask(name, submesh, repeats=False, **options)


def chained(*names):
    return list(itertools.pairwise(names))


@pytest.fixture(params=["1f1b", "gpipe"])
def run(request, graphs):
    def build_and_check(graph):
        schedule = build(graph, request.param)
        timeline = validate(graph, schedule)
        graphs.check_run(graph, schedule, timeline)
        return format_schedule(graph, schedule), timeline

    return build_and_check


def test_evaluation_is_a_plain_pipeline(graphs, run):
    tasks = [forward(f"F{i}", i) for i in range(3)]
    text, timeline = run(graphs.make(tasks, chained("F0", "F1", "F2"), 5))
    assert text == "\n".join(" ".join(f"{k}F{i}" for k in range(5)) for i in range(3))
    assert timeline.makespan == 5 + 2


def test_a_fast_sender_waits_for_its_receiver(graphs, run):
    # Nothing but the receiver holds F0 back: it must not put all 20 activations in flight.
    tasks = [forward("F0", 0), forward("F1", 1, cost=10)]
    _, timeline = run(graphs.make(tasks, [("F0", "F1")], 20))
    assert timeline.peak_live[0] == 2
    assert timeline.makespan == 1 + 20 * 10


def test_a_frozen_first_stage_stays_within_its_cap(graphs, run):
    tasks = [forward("F0", 0), forward("F1", 1), merged("F2B2", 2, cost=2), backward("B1", 1)]
    edges = [*chained("F0", "F1", "F2B2", "B1"), ("F1", "B1")]
    _, timeline = run(graphs.make(tasks, edges, 12))
    assert timeline.peak_live[0] <= 3


def test_a_receiver_that_starts_late_does_not_stop_its_sender(graphs, run):
    # Under GPipe, B2 (a receiver of the frozen F0) starts only after every F2, and so every F0.
    tasks = [forward("F0", 0), forward("F1", 1), forward("F2", 2), merged("F3B3", 3, cost=2)]
    tasks += [backward("B2", 2)]
    edges = [*chained("F0", "F1", "F2", "F3B3", "B2"), ("F2", "B2"), ("F0", "B2")]
    run(graphs.make(tasks, edges, 9))


def test_stages_that_visit_a_submesh_twice(graphs, run):
    tasks = [forward("F0", 0), forward("F1", 1), forward("F2", 0), merged("F3B3", 1, cost=2)]
    tasks += [backward("B2", 0), backward("B1", 1), backward("B0", 0)]
    edges = chained("F0", "F1", "F2", "F3B3", "B2", "B1", "B0")
    edges += [("F0", "B0"), ("F1", "B1"), ("F2", "B2")]
    graph = graphs.make(tasks, edges, 8)
    assert caps(graph) == {0: 4, 1: 3, 2: 2, 3: 1}
    _, timeline = run(graph)
    assert timeline.makespan >= 8 * 4


def test_embedding_and_head_share_a_submesh(graphs, run):
    tasks = [forward("F0", 0), forward("F1", 1), merged("F2B2", 0, cost=2)]
    tasks += [backward("B1", 1), backward("B0", 0)]
    edges = [*chained("F0", "F1", "F2B2", "B1", "B0"), ("F0", "B0"), ("F1", "B1")]
    run(graphs.make(tasks, edges, 6))


def test_encoder_decoder(graphs, run):
    # The encoder's output is read by both decoder stages, whose tokens start on submesh 1.
    tasks = [forward("E0", 0), forward("D1", 1), merged("D2", 2, cost=2)]
    tasks += [backward("DB1", 1), backward("EB0", 0)]
    edges = [*chained("E0", "D1", "D2", "DB1", "EB0"), ("E0", "D2"), ("D2", "EB0")]
    edges += [("E0", "EB0"), ("D1", "DB1")]
    graph = graphs.make(tasks, edges, 7)
    assert caps(graph) == {0: 3, 1: 2, 2: 1}
    run(graph)


def test_one_microbatch_through_many_stages(graphs, run):
    _, timeline = run(graphs.chain(12, 1))
    assert timeline.makespan == 24
    assert set(timeline.peak_live) == {1}


def test_two_submeshes_over_the_same_devices_take_turns(graphs, run):
    tasks = [forward("F0", 0), merged("F1B1", 1, cost=2), backward("B0", 0)]
    edges = [*chained("F0", "F1B1", "B0"), ("F0", "B0")]
    _, timeline = run(graphs.make(tasks, edges, 5, resources=[{0, 1}, {0, 1}]))
    assert timeline.makespan == 5 * 4
    assert timeline.bubble_fraction == 0


def test_submeshes_that_share_one_rank_compete_for_it(graphs, run):
    tasks = [forward("A", 0), forward("B", 1), forward("C", 2)]
    _, timeline = run(graphs.make(tasks, [], 3, resources=[{0, 1}, {1, 2}, {3}]))
    assert timeline.makespan == 6  # A and B by turns, C beside them
    assert timeline.bubble_fraction == pytest.approx(1 - (2 * 6 + 3) / (4 * 6))


def test_work_around_the_loop(graphs, run):
    tasks = [once("P", 0), once("Q", 1), forward("F0", 0), merged("F1B1", 1), backward("B0", 0)]
    tasks += [once("U0", 0), once("U1", 1), once("V0", 0), once("V1", 1)]
    edges = [*chained("P", "Q", "F1B1", "B0"), *chained("F0", "B0", "U0"), ("F0", "F1B1")]
    edges += [("F1B1", "U1"), ("U0", "V0"), ("U1", "V0"), ("U0", "V1"), ("U1", "V1")]
    text, _ = run(graphs.make(tasks, edges, 3, carried=[("B0", "B0")]))
    first, second = text.splitlines()
    assert first.startswith("P 0F0") and first.endswith("2B0 U0 V0")
    assert second == "Q 0F1B1 1F1B1 2F1B1 U1 V1"


def test_carried_state_makes_a_forward_wait_for_a_backward(graphs, run):
    # BatchNorm statistics that the backward pass updates: GPipe must give up its order, not hang.
    tasks = [forward("F0", 0), merged("F1B1", 1), backward("B0", 0)]
    edges = [*chained("F0", "F1B1", "B0"), ("F0", "B0")]
    text, _ = run(graphs.make(tasks, edges, 3, carried=[("B0", "F0")]))
    assert text.splitlines()[0] == "0F0 0B0 1F0 1B0 2F0 2B0"


def test_two_loops_with_work_between_them(graphs, run):
    # S waits for every F, so F must run ahead of its cap: a cap is a wish, finishing is not.
    tasks = [forward("F", 0), once("S", 0), backward("B", 0)]
    text, _ = run(graphs.make(tasks, [("F", "S"), ("S", "B"), ("F", "B")], 3))
    assert text == "0F 1F 2F S 0B 1B 2B"


def test_free_tasks_stand_after_what_they_wait_for(graphs, run):
    tasks = [forward("F0", 1, cost=0), merged("F1B1", 0, cost=0), backward("B0", 1, cost=0)]
    _, timeline = run(graphs.make(tasks, chained("F0", "F1B1", "B0"), 3))
    assert timeline.makespan == 0
    assert timeline.bubble_fraction == 0
