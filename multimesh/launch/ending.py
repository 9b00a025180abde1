"""A rank that is done waits for the others, then all leave together.

Without this the first rank to end would sit in JAX's shutdown barrier, which gives up after
some minutes and then kills the job. The wait here has no limit while any rank moves: an epoch may
take hours longer elsewhere. A rank that fails ends the job anyway, and `stall` ends it when no
rank has moved for the stall timeout.
"""

import atexit
import opcode
import os
import sys
import threading
import time

from multimesh.launch import failure
from multimesh.launch.activity import Wait, activity
from multimesh.launch.frames import OWN_THREADS
from multimesh.launch.stall import monitor

__all__ = ["end_together"]

_POLL_SECONDS = 0.002


def end_together(communicator):
    """Makes this process, when it ends, wait for all others to end too.

    A rank that ends through `sys.exit` with an error aborts the job instead.

    Args:
      communicator: One that nothing else uses: the ranks meet in its only operation.
    """
    exits = _ExitWatch()
    sys.exit = exits
    threading.Thread(
        target=_leave_with_error, args=(exits,), name=f"{OWN_THREADS} ending", daemon=True
    ).start()
    process = os.getpid()

    def meet():
        if os.getpid() != process:
            return  # a forked child is no rank
        code = exits.code()
        if code:
            failure.abort(code)
        _wait_for_all(communicator)

    # Exit hooks run last in, first out: JAX, imported earlier, still finds every rank alive.
    atexit.register(meet)


def _wait_for_all(communicator):
    present = activity()
    present.is_ending = True
    monitor().say_ended()
    others = [rank for rank in range(communicator.Get_size()) if rank != communicator.Get_rank()]
    with present.waiting(Wait(tuple(others), "end")):
        everyone = communicator.Ibarrier()
        while not everyone.Test():
            time.sleep(_POLL_SECONDS)  # a waiting rank leaves its core to those that work
    monitor().stop()


def _leave_with_error(exits):
    """Ends this process if it fails, before Python waits for the program's other threads."""
    threading.main_thread().join()
    code = exits.code()
    if code:
        failure.leave(code)


class _ExitWatch:
    """Stands in for `sys.exit`, to know at the end whether it ended the program with an error.

    Python tells an exit hook neither the exception nor the exit code, and calls no
    `sys.excepthook` for SystemExit.
    """

    def __init__(self):
        self._exit = sys.exit
        self._code = 0
        self._outermost = None

    def __call__(self, status=None, /):
        # In another thread, sys.exit ends that thread only.
        if threading.current_thread() is threading.main_thread():
            self._code = failure.exit_code(SystemExit(status))
            self._outermost = sys._getframe()
            while self._outermost.f_back is not None:
                self._outermost = self._outermost.f_back
        self._exit(status)

    def code(self) -> int:
        """The code that `sys.exit` ends this program with; 0 if it does not."""
        if self._outermost is None:
            return 0
        # If something caught the SystemExit, the program went on and its outermost frame ended
        # with a return; otherwise the frame was left in the middle.
        last = self._outermost.f_code.co_code[self._outermost.f_lasti]
        return 0 if opcode.opname[last].startswith("RETURN") else self._code
