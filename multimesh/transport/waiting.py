"""Waiting for a message without taking the core that the computation needs.

MPI's own waits poll at full speed. With as many ranks as cores, or more, a rank that polls takes
time from the rank that computes what it is waiting for.
"""

import time
from collections.abc import Callable

__all__ = ["wait_until"]

_SPIN = 50e-6  # seconds: messages that are nearly there come without the price of a sleep


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
