"""On a chain of stages the builders must give the schedules of the textbooks."""

import dataclasses
import time

import pytest

from multimesh.schedule import build, caps, format_schedule, simulate, validate

RATIOS = [(1, 1), (1, 2), (2, 1), (1, 3)]


def textbook_1f1b(stages, microbatches):
    """Per stage: warm-up forwards, then one forward and one backward by turns, then cool-down."""
    lines = []
    for stage in range(stages - 1):
        warm_up = min(stages - stage - 1, microbatches)
        line = [f"{k}F{stage}" for k in range(warm_up)]
        for k in range(warm_up, microbatches):
            line += [f"{k}F{stage}", f"{k - warm_up}B{stage}"]
        line += [f"{k}B{stage}" for k in range(microbatches - warm_up, microbatches)]
        lines.append(" ".join(line))
    last = stages - 1
    lines.append(" ".join(f"{k}F{last}B{last}" for k in range(microbatches)))
    return "\n".join(lines)


@pytest.mark.parametrize(("forward", "backward"), RATIOS)
@pytest.mark.parametrize("stages", range(1, 9))
def test_1f1b_is_the_textbook_order_with_its_makespan_and_memory(graphs, stages, forward, backward):
    for microbatches in range(1, 17):
        graph = graphs.chain(stages, microbatches, forward, backward)
        schedule = build(graph)
        assert format_schedule(graph, schedule) == textbook_1f1b(stages, microbatches)
        timeline = validate(graph, schedule)
        graphs.check_run(graph, schedule, timeline)
        start = timeline.start
        assert timeline.total_order == tuple(
            sorted(start, key=lambda a: (start[a], graph.tasks[a.task].submesh, a.microbatch))
        )
        work = forward + backward
        assert timeline.makespan == (microbatches + stages - 1) * work
        bubble = (stages - 1) / (microbatches + stages - 1)
        assert timeline.bubble_fraction == pytest.approx(bubble)
        for stage in range(stages):
            assert timeline.peak_live[stage] == min(stages - stage, microbatches)


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gpipe_runs_every_forward_before_any_backward(graphs, stages, microbatches):
    graph = graphs.chain(stages, microbatches, 1, 2)
    schedule = build(graph, "gpipe")
    every = range(microbatches)
    lines = [
        " ".join([f"{k}F{i}" for k in every] + [f"{k}B{i}" for k in every])
        for i in range(stages - 1)
    ]
    lines.append(" ".join(f"{k}F{stages - 1}B{stages - 1}" for k in every))
    assert format_schedule(graph, schedule) == "\n".join(lines)
    timeline = validate(graph, schedule)
    graphs.check_run(graph, schedule, timeline)
    assert timeline.peak_live[: stages - 1] == (microbatches,) * (stages - 1)


def test_caps_count_the_forward_tasks_that_are_left(graphs):
    assert caps(graphs.chain(4, 8)) == {0: 4, 1: 3, 2: 2, 3: 1}
    assert caps(graphs.chain(1, 8)) == {0: 1}


def test_one_slow_stage_sets_the_pace(graphs):
    graph = graphs.chain(3, 20)
    tasks = [
        dataclasses.replace(task, cost=3.0 if task.submesh == 1 else task.cost)
        for task in graph.tasks
    ]
    graph = dataclasses.replace(graph, tasks=tuple(tasks))
    # At least one forward of stage 0, all the work of stage 1, and one backward of stage 0; little
    # more, since stage 1 is idle only while it waits for its first cotangent.
    bound = 1 + 20 * (3 + 3) + 1
    assert bound <= simulate(graph, build(graph)).makespan <= bound + 2


def test_a_long_pipeline_is_scheduled_quickly(graphs):
    graph = graphs.chain(64, 256)
    begin = time.process_time()
    schedule = build(graph)
    assert time.process_time() - begin < 3.0  # CPU time; about 0.4 s
    assert simulate(graph, schedule).makespan == (256 + 63) * 2
