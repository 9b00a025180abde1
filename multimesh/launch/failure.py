"""One rank's uncaught exception ends the job at once, with that exception on the screen.

Left alone, a failed rank hangs: Python runs its exit hooks, JAX's waits for the other ranks, and
those wait for a message from the failed one. So a rank that fails shows its traceback and leaves
without any hook: under mmrun through `program`, under bare `mpirun` through the hooks that
`install_hooks` puts in place.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = [
    "JobEndingHook",
    "abort",
    "exit_code",
    "format_exception",
    "give_way_to_first",
    "install_hooks",
    "leave",
    "leave_forked",
    "watch_exit_hooks",
]

_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention

# What gloo, gRPC, JAX's coordination service and MPI say when a peer is gone.
_LOST_PEER = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "socket closed",
    "broken pipe",
    "unavailable:",
    "coordination service",
    "heartbeat",
    "mpi_err_proc_failed",
)


def exit_code(exc: BaseException) -> int:
    """The exit code of a process that `exc` ends, as Python itself decides it."""
    if isinstance(exc, SystemExit):
        if exc.code is None:
            return 0
        return exc.code & 0xFF if isinstance(exc.code, int) else 1
    return _INTERRUPTED if isinstance(exc, KeyboardInterrupt) else 1


def format_exception(exc: BaseException, hidden_files: tuple[str, ...] = ()) -> str:
    """The traceback of `exc`, without the outermost frames that belong to `hidden_files`."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hidden_files:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(exc), exc, frames))


def give_way_to_first(exc: BaseException):
    """Waits a second if `exc` looks like the loss of a peer.

    The peer that died is the news. It ends the job within that second, and is then the one that
    is reported.
    """
    # Unlike `str`, this never raises what the exception's own __str__ does.
    text = "".join(traceback.format_exception_only(exc)).lower()
    if any(sign in text for sign in _LOST_PEER):
        time.sleep(1.0)


def leave(code: int) -> NoReturn:
    """Ends this process now: output flushed, no exit hook run."""
    _flush()
    os._exit(code)


def abort(code: int) -> NoReturn:
    """Ends the job now, through MPI where it runs."""
    # Looked up, not imported: a rank that fails before MPI has started must not start it.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        _flush()
        mpi.COMM_WORLD.Abort(code)
    leave(code)


def leave_forked(exc: BaseException, show: Callable[..., Any] = sys.__excepthook__) -> NoReturn:
    """Ends a process that a rank has forked, and that is no rank, by an uncaught exception.

    The exit hooks are the rank's: JAX's and MPI's would wait for other ranks.
    """
    if not isinstance(exc, SystemExit):
        show(type(exc), exc, exc.__traceback__)
    leave(exit_code(exc))


class JobEndingHook:
    """A `sys.excepthook` that lets the previous hook print, and then ends the whole job."""

    def __init__(self, place: str, previous):
        self.place = place
        self.previous = previous
        self.process = os.getpid()

    def __call__(self, kind, exc, trace):
        """Called by Python with an exception that nothing caught in the main thread."""
        if os.getpid() != self.process:
            leave_forked(exc, self.previous)
        give_way_to_first(exc)
        sys.stderr.write(f"multimesh: uncaught exception on {self.place}; the job ends.\n")
        self.previous(kind, exc, trace)
        abort(exit_code(exc))


def install_hooks(rank: int, size: int | None):
    """Makes an uncaught exception of the main thread, or of an exit hook, end the whole job.

    Args:
      rank: This rank, for the line above the traceback.
      size: Number of ranks, or None if the launcher did not say.
    """
    if not isinstance(sys.excepthook, JobEndingHook):
        of_all = f" of {size}" if size else ""
        place = f"rank {rank}{of_all} on {socket.gethostname()}"
        sys.excepthook = hook = JobEndingHook(place, sys.excepthook)
        watch_exit_hooks(lambda exc: hook(type(exc), exc, exc.__traceback__))


def watch_exit_hooks(fail: Callable[[BaseException], None]):
    """Has `fail` called with an exception of an exit hook; Python would only mention it."""
    previous, process = sys.unraisablehook, os.getpid()

    def hook(unraisable):
        is_ours = "atexit callback" in (unraisable.err_msg or "") and os.getpid() == process
        if is_ours and unraisable.exc_value:
            fail(unraisable.exc_value)
        else:
            previous(unraisable)

    sys.unraisablehook = hook


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C libraries have printed
