"""A rank that is done waits for the others, then all leave together.

Without this the first rank to end would sit in JAX's shutdown barrier, which gives up after
some minutes and then kills the job. The wait here has no limit: an epoch may take hours longer
elsewhere, and a rank that fails ends the job anyway.
"""

import atexit
import sys
import time

from multimesh.launch import failure

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

    def meet():
        code = exits.code()
        if code:
            failure.abort(code)
        everyone = communicator.Ibarrier()
        while not everyone.Test():
            time.sleep(_POLL_SECONDS)  # a waiting rank leaves its core to those that work

    # Exit hooks run last in, first out: JAX, imported earlier, still finds every rank alive.
    atexit.register(meet)


class _ExitWatch:
    """Stands in for `sys.exit`, to know at the end whether it ended the program with an error.

    Python tells an exit hook neither the exception nor the exit code, and calls no
    `sys.excepthook` for SystemExit.
    """

    def __init__(self):
        self._exit = sys.exit
        self._last: SystemExit | None = None
        self._outermost = None

    def __call__(self, status=None, /):
        self._outermost = sys._getframe()
        while self._outermost.f_back is not None:
            self._outermost = self._outermost.f_back
        try:
            self._exit(status)
        except SystemExit as exc:
            self._last = exc
            raise

    def code(self) -> int:
        """The code that `sys.exit` ends this program with; 0 if it does not."""
        trace = self._last.__traceback__ if self._last else None
        if trace is None or trace.tb_frame is not self._outermost:
            return 0  # caught on its way
        # The outermost frame saw it. Unless it was caught there, that frame did nothing since.
        is_uncaught = trace.tb_frame.f_lasti == trace.tb_lasti
        return failure.exit_code(self._last) if is_uncaught else 0
