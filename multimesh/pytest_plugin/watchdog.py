"""Ends a rank whose test hangs, after the stacks of all its threads are written.

The stacks are written by faulthandler's own thread, which needs no lock of Python's. The process
is ended a little later, so that all ranks can write theirs: the first that goes takes the others
with it. A rank that has lost the pytest which started its job ends too.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

__all__ = ["Watchdog"]

_POLL_SECONDS = 0.25


class Watchdog:
    """One process's watchdog. Armed again and again; the last time counts."""

    def __init__(self, descriptor: int, patience: float, is_lost: Callable[[], bool]):
        """Prepares a watchdog that is not armed.

        Args:
          descriptor: An open file for the stacks.
          patience: Seconds between the stacks and the end.
          is_lost: Says whether the process is to end at once.
        """
        self._descriptor = descriptor
        self._patience = patience
        self._is_lost = is_lost
        self._end_at = float("inf")
        self._message = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def arm(self, seconds: float, message: str = ""):
        """Ends the process this many seconds from now, unless it is armed again before.

        Args:
          seconds: The time left; if there is none, the end is under way.
          message: What to write after the stacks.
        """
        if seconds > 0:
            self._message = message
            self._end_at = time.monotonic() + seconds + self._patience
            # pytest's own faulthandler plugin uses the same timer, and cancels it after each test.
            faulthandler.dump_traceback_later(seconds, file=self._descriptor)

    def disarm(self):
        """Does nothing until it is armed again."""
        self._end_at = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        while time.monotonic() < self._end_at and not self._is_lost():
            time.sleep(_POLL_SECONDS)
        os.write(self._descriptor, self._message.encode())
        # Not through MPI: this is not the main thread, and that one is in a call of MPI's.
        os._exit(1)
