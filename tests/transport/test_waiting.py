"""Waiting is prompt for what is there, patient for what is not, and ends."""

import time

import pytest

from multimesh.errors import StallError
from multimesh.transport.group import MpiGroup
from multimesh.transport.waiting import wait_until


def test_what_is_there_needs_one_look():
    looks = []
    assert wait_until(lambda: looks.append(1) or True, timeout=0, longest_sleep=1e-3)
    assert looks == [1]


def test_it_ends_at_the_timeout():
    start = time.monotonic()
    assert not wait_until(lambda: False, timeout=0.05, longest_sleep=1e-3)
    assert 0.05 <= time.monotonic() - start < 1


def test_it_does_not_poll_at_full_speed():
    looks = []
    wait_until(lambda: bool(looks.append(1)), timeout=0.2, longest_sleep=1e-3)
    assert len(looks) < 2000  # at full speed it would be a hundred times as many


def test_it_sees_the_end_soon():
    end = time.monotonic() + 0.1
    assert wait_until(lambda: time.monotonic() > end, timeout=10, longest_sleep=1e-3)
    assert time.monotonic() - end < 0.5


class Deserted:
    """A communicator whose other ranks never come, or leave after the meeting."""

    rank, size = 1, 3

    def __init__(self, *, do_meet):
        self.is_done = do_meet

    def Iallgather(self, mine, everyone):
        everyone[:] = bytes(mine) * self.size
        return self

    def Test(self):
        return self.is_done

    def _leave(self, *_):
        self.is_done = False
        return self

    Iallgatherv = Igatherv = Ibcast = _leave


CALLS = {
    "allgather": lambda group: group.allgather(0, "test"),
    "gather": lambda group: group.gather(0, "test"),
    "broadcast": lambda group: group.broadcast(0, "test", root=1),
}
NOBODY = r"Rank 1 waited 0.01 s for ranks 0, 2 to reach.*: test.*MULTIMESH_STALL_TIMEOUT"


@pytest.mark.parametrize("call", [*CALLS.values(), lambda group: group.barrier("test")])
def test_a_collective_that_nobody_comes_to(call):
    group = MpiGroup(Deserted(do_meet=False), stall_timeout=0.01)
    with pytest.raises(StallError, match=NOBODY):
        call(group)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_collective_that_others_leave_in_the_middle(call):
    group = MpiGroup(Deserted(do_meet=True), stall_timeout=0.01)
    with pytest.raises(StallError, match=NOBODY):
        call(group)
