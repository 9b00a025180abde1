"""What ranks say of themselves, and what is concluded from it, without any job."""

import dataclasses
import json
import sys
import threading
import time

import pytest

from multimesh.launch.activity import Activity, Wait, name_ranks
from multimesh.launch.frames import main_position, main_stack, stacks
from multimesh.launch.hang import Answer, find_culprit, find_cycle, is_stuck, may_be_late, report
from multimesh.launch.movement import Movement, Sample, has_moved
from multimesh.launch.notices import Notices
from multimesh.launch.stall import Monitor


def describe(number):
    return f"instruction {number}"


def test_activity_in_words():
    activity = Activity()
    assert activity.text("train.py:3: load()") == "outside a step, 0 steps done: train.py:3: load()"
    with activity.step(describe):
        activity.instruction = 4
        assert activity.text("here") == (
            "in step 1, instruction 4: here; the last instruction that it finished: instruction 3"
        )
        with activity.waiting(Wait((1, 2), "send microbatch 0 of F0 -> F1")):
            assert "waits 0.0 s for ranks 1, 2 to send microbatch 0 of F0" in activity.text("here")
            assert activity.waits_for == (1, 2)
    assert activity.last_finished() == "step 1"


def test_a_rank_at_its_end_waits_for_those_that_have_not_ended():
    activity = Activity()
    activity.is_ending = True
    activity.ended[1] = 7
    with activity.waiting(Wait((1, 2, 3), "end")):
        assert activity.waits_for == (2, 3)
        assert not activity.has_time_limit
        assert activity.text("") == "at its end, 0 steps done: waits 0.0 s for ranks 2, 3 to end"


def test_many_ranks_have_a_short_name():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(64)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"


def answers(still=10.0, is_waiting=True, **waits_for):
    return {
        int(name[1:]): Answer(f"does {name}", still, is_waiting, ranks)
        for name, ranks in waits_for.items()
    }


@pytest.mark.parametrize(
    ("waits_for", "cycle", "culprit_of_0"),
    [
        ({"r0": [1], "r1": [0], "r2": [0]}, [0, 1], None),
        ({"r0": [1], "r1": [2], "r2": [1]}, [1, 2], None),
        ({"r0": [1], "r1": [2], "r2": []}, [], 2),
        ({"r0": [1], "r1": []}, [], 2),  # rank 2 does not answer
        ({"r0": [1, 2], "r1": [0], "r2": []}, [], 2),
        ({"r0": [], "r1": [0], "r2": []}, [], None),
        ({"r1": [2], "r2": [1]}, [1, 2], 0),
    ],
)
def test_who_waits_for_whom(waits_for, cycle, culprit_of_0):
    assert find_cycle(answers(**waits_for)) == cycle
    assert find_culprit(answers(**waits_for), 0, ["n1"] * 3) == culprit_of_0


@pytest.mark.parametrize(("still", "culprit"), [(7.0, 2), (0.5, 1)])
def test_a_rank_that_says_that_it_does_not_move_is_rather_it_than_silent_ones(still, culprit):
    heard = answers(r0=[1, 2, 3]) | answers(still, r2=[])
    assert find_culprit(heard, 0, ["n1"] * 4) == culprit


@pytest.mark.parametrize(
    ("hosts", "culprit"),
    [(["n1", "n1", "n2", "n2"], 2), (["n1", "n1", "n1", "n2"], 3), (["n1"] * 4, None)],
)
def test_a_host_that_is_cut_off_is_it_where_nobody_knows_whom_the_others_wait_for(hosts, culprit):
    assert find_culprit(answers(r0=[], r1=[]), 0, hosts) == culprit


def test_a_report_has_a_line_for_every_rank():
    text = report("It hangs.", answers(r0=[1], r1=[0]), ["n1", "n1", "n2"])
    assert text == (
        "multimesh: It hangs. What every rank does:\n"
        "  rank 0 on n1: does r0\n"
        "  rank 1 on n1: does r1\n"
        "  rank 2 on n2: does not answer: it is stopped, its interpreter is blocked, or its "
        "host is cut off\n"
        "  a cycle: rank 0 waits for rank 1, rank 1 waits for rank 0\n"
    )


def test_without_rank_0_the_others_cannot_be_asked():
    lines = report("It hangs.", answers(r1=[0]), ["n1", "n1", "n2"]).splitlines()
    assert lines[1].startswith("  rank 0 on n1: does not answer")
    assert lines[2:] == [
        "  rank 1 on n1: does r1",
        "  rank 2 on n2: cannot be asked without rank 0",
    ]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (answers(r0=[1], r1=[]), answers(r0=[1], r1=[]), True),
        (answers(r0=[1]), answers(r0=[1]), True),  # rank 1 is silent, and was
        (answers(r0=[1], r1=[]), answers(r0=[1]), False),  # it has just fallen silent
        (answers(r0=[1], r1=[]), answers(still=4.9, r0=[1], r1=[]), False),  # it has moved
        (answers(r0=[], r1=[]), answers(is_waiting=False, r0=[], r1=[]), False),  # both sleep
    ],
)
def test_when_a_job_is_stuck(before, now, expected):
    assert is_stuck(before, now, size=2, timeout=5) is expected


def sample(mark=0, processor=0.0, at=0.0, is_polling=False):
    return Sample(mark, "", is_polling, processor, at)


@pytest.mark.parametrize(
    ("answered", "hosts", "expected"),
    [
        ([0], "aa", False),  # only one is silent: it is the culprit
        ([0], "aaa", True),
        ([0, 1], "aabb", False),
        ([0, 1, 2], "aabb", False),
        ([0], "aabb", True),
        ([0, 1, 2, 3], "aabb", False),
    ],
)
def test_which_silent_ranks_may_just_be_late(answered, hosts, expected):
    assert may_be_late(answered, hosts) is expected


def test_a_rank_moves_when_its_code_moves_or_it_computes():
    assert has_moved(sample(mark=0), sample(mark=1, at=1))
    assert has_moved(sample(), sample(processor=0.5, at=1))
    assert not has_moved(sample(), sample(processor=0.01, at=1))
    assert not has_moved(sample(), sample(processor=0.9, at=1, is_polling=True))


class Communicator:
    recv = sendrecv = Barrier = split = staticmethod(time.sleep)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda c: c.recv(0.2), True),
        (lambda c: c.Barrier(max(0.2, 0.1)), True),
        (lambda c: c.split(0.2), False),
        (lambda c: time.sleep(0.2), False),
    ],
)
def test_the_call_that_the_main_thread_is_in(monkeypatch, call, expected):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    seen = []

    def look():
        time.sleep(0.05)
        seen.extend([main_position(), main_position(), main_stack(), stacks()])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    call(Communicator)
    thread.join()
    first, second, stack, all_stacks = seen
    assert first.is_mpi_wait is expected
    assert first.mark == second.mark
    assert first.text.startswith("test_hang_parts.py:")
    assert "call(Communicator)" in stack
    assert "Thread MainThread:" in all_stacks
    assert main_position().mark != first.mark


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_prints_its_report_where_nobody_takes_it(capsys, rank):
    class Silent:
        def post(self, **fields):
            return None  # as when rank 0 is too busy to answer in time

        def answers(self, number, seconds):
            raise AssertionError("a question that was not posted has no answers")

    asking = Monitor()
    asking._notices, asking._movement = Silent(), Movement()
    asking._rank, asking._hosts, asking._threads = rank, ("h", "h"), [threading.current_thread()]
    asking.report("Something is late.")
    assert "multimesh: Something is late." in capsys.readouterr().err


def test_a_busy_rank_0_has_more_time_to_pass_on_a_question_than_other_notices():
    answer = Answer("computes", still=0.0, is_waiting=False, waits_for=[])

    class Busy(dict):
        """A key-value store that takes its time."""

        def key_value_increment(self, key, step):
            time.sleep(1.2)
            return step

        key_value_set = dict.__setitem__

        def blocking_key_value_get(self, key, milliseconds):
            return self[key]

    assert Notices(Busy(), 0, 1).post(kind="report", text="") is None
    asking = Monitor()
    store = Busy({"multimesh/answers/1/0": json.dumps(dataclasses.asdict(answer))})
    asking._notices, asking._movement = Notices(store, 0, 1), Movement()
    assert asking._inquire() == {0: answer}
