"""Waiting for a message without taking the core that the computation needs.

MPI's own waits poll at full speed. With as many ranks as cores, or more, a rank that polls takes
time from the rank that computes what it is waiting for.
"""

import math
import time
from collections.abc import Callable

from multimesh.errors import StallError
from multimesh.launch.activity import Wait, activity, name_ranks
from multimesh.launch.stall import monitor

__all__ = ["wait_for_ranks", "wait_until"]

_SPIN = 50e-6  # seconds: messages that are nearly there come without the price of a sleep
_IN_FLIGHT = 1.0  # seconds in which the last messages of a rank that has ended arrive


def wait_until(done: Callable[[], bool], timeout: float, longest_sleep: float) -> bool:
    """Polls `done`: at first at full speed, then ever less often.

    Each sleep is an eighth of what was waited so far, so it adds at most an eighth to the wait.

    Args:
      done: Whether the wait is over. It also drives MPI forward, so it is always called once.
      timeout: Seconds.
      longest_sleep: Seconds.

    Returns:
      Whether `done` came true in time.
    """
    if done():
        return True
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        if waited > _SPIN:
            time.sleep(min(waited / 8, longest_sleep))
    return True


def wait_for_ranks(
    done: Callable[[], bool],
    timeout: float,
    longest_sleep: float,
    describe: Callable[[], Wait],
    rank: int,
) -> None:
    """Polls `done` as `wait_until` does, and lets everybody know what this rank waits for.

    Args:
      done: Whether the wait is over.
      timeout: Seconds.
      longest_sleep: Seconds.
      describe: Says what is still waited for; asked only if that does not come at once.
      rank: This rank.

    Raises:
      StallError: It took longer than the timeout, or a rank that is waited for has ended.
    """
    if wait_until(done, _SPIN, longest_sleep):
        return
    with activity().waiting(describe()):
        if not wait_until(_unless_ended(done, describe, rank), timeout, longest_sleep):
            raise _too_long(describe(), timeout, rank)


def _unless_ended(done, describe, rank):
    """Returns `done`, but it raises when it cannot come true any more."""
    noticed = math.inf  # when it was seen that one has ended

    def look():
        nonlocal noticed
        if done():
            return True
        if activity().ended:
            wait, now = describe(), time.monotonic()
            ended = activity().ended_among(wait.ranks)
            noticed = min(noticed, now) if ended else math.inf
            if now - noticed > _IN_FLIGHT:
                raise _in_vain(wait, ended[0], rank)
        return False

    return look


def _too_long(wait, timeout, rank):
    problem = f"Rank {rank} waited {timeout:g} s for {name_ranks(wait.ranks)} to {wait.until}."
    culprit = monitor().report(problem)
    return _error(
        f"{problem} Look for an error or a slow step on {name_ranks(wait.ranks)}, or raise "
        "MULTIMESH_STALL_TIMEOUT.",
        culprit,
    )


def _in_vain(wait, ended, rank):
    monitor().give_way()
    steps = activity().ended[ended]
    return _error(
        f"Rank {ended} ended its program with exit code 0 after {steps} steps, but rank {rank}, "
        f"after {activity().steps}, waits for it to {wait.until}. All ranks must run the same "
        "number of steps.",
        ended,
    )


def _error(text, culprit):
    last = activity().last_finished()
    error = StallError(f"{text} The last instruction that this rank finished: {last}.")
    error.culprit = culprit
    return error
