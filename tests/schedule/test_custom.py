"""Schedules that a user writes down, and the wavefront."""

import pytest

from multimesh.errors import ScheduleError, UsageError
from multimesh.schedule import build, custom_text, format_schedule, validate


def test_a_table_as_text_and_back(graphs):
    graph = graphs.chain(2, 3)
    table = [["F0", "F0", "F0", "B0", "B0", "B0"], [(0, "F1B1"), (1, "F1B1"), (2, "F1B1")]]
    text = custom_text(table)
    assert text == "custom:F0,F0,F0,B0,B0,B0|0:F1B1,1:F1B1,2:F1B1"
    schedule = build(graph, text)
    assert format_schedule(graph, schedule) == "0F0 1F0 2F0 0B0 1B0 2B0\n0F1B1 1F1B1 2F1B1"
    graphs.check_run(graph, schedule, validate(graph, schedule))


def test_other_names_of_tasks(graphs):
    graph = graphs.chain(2, 2)
    schedule = build(graph, custom_text([["F0", "B0", "F0", "B0"], ["head", "head"]]), {"head": 1})
    assert format_schedule(graph, schedule).endswith("0F1B1 1F1B1")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([["F0"], []], "F0 1 times, F1B1 0 times, B0 0 times"),
        ([["F0", (0, "F0"), "B0", "B0"], ["F1B1", "F1B1"]], "F0 not for microbatch 1"),
        ([["F0", (5, "F0"), "B0", "B0"], ["F1B1", "F1B1"]], "F0 not for microbatch 1"),
        (
            [["F0", "F0", (1, "B0"), (0, "B0")], ["F1B1", "F1B1"]],
            "microbatches [1, 0] of B0, which adds up results: those must be in order",
        ),
        ([["nothing"], []], "names 'nothing' for submesh 0, whose tasks are F0, B0"),
        ([[], ["F0"]], "'F0' in list 1, but it runs on submesh 0"),
        ([[], [], []], "for each of the 2 submeshes. Got 3"),
    ],
)
def test_tables_that_do_not_fit(graphs, table, words):
    with pytest.raises(ScheduleError) as caught:
        build(graphs.chain(2, 2), custom_text(table))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "table", ["F0", [["F0"], "F0"], [["a,b"]], [[("F0", 0)]], [[(-1, "F0")]], [[3]], 7, [["0/1"]]]
)
def test_tables_that_are_none(table):
    with pytest.raises(UsageError, match="a list for each submesh"):
        custom_text(table)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_the_wavefront_finishes(graphs, stages, microbatches):
    graph = graphs.chain(stages, microbatches)
    schedule = build(graph, "wavefront")
    graphs.check_run(graph, schedule, validate(graph, schedule))


def test_the_wavefront_follows_the_diagonals(graphs):
    # B0 of microbatch 0 lies on diagonal 2, as F0 of 2, which can start while F1B1 still runs.
    graph = graphs.chain(2, 4)
    schedule = build(graph, "wavefront")
    first = format_schedule(graph, schedule).splitlines()[0]
    assert first == "0F0 1F0 2F0 0B0 3F0 1B0 2B0 3B0"
