"""Whether this job was told to end soon: the same answer on every rank at the same step.

A notice is a SIGTERM or SIGUSR1. It may come to one rank only, and comes to ranks in different
steps; JAX's preemption service has them agree on the next step that all can still reach. JAX
takes SIGTERM for that when jax.distributed starts, and a program that never asks would no longer
end by it. So SIGTERM keeps its usual effect until `preempted` is first called.
"""

import ctypes
import functools
import os
import signal
import threading

from multimesh.errors import UsageError
from multimesh.launch import wire
from multimesh.launch.environment import detect_launcher
from multimesh.launch.startup import require_init

__all__ = ["preempted", "release_sigterm"]

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


def preempted() -> bool:
    """Whether this job was told to end soon, so that the program should save and end.

    Call it once a step on every rank: it becomes true at the same call on all of them, some
    steps after SIGTERM or SIGUSR1 came to mmrun or to any rank, and stays true. It costs
    microseconds. Before the first call those signals end the program as usual; a handler that
    the program had set until then is called as well.

    Returns:
      Whether to save and end now.

    Raises:
      StartupError: A launcher started several ranks, and `init` was not called.
      UsageError: The first call is not in the main thread, where Python handles signals.
    """
    return _watch().ask()


def release_sigterm():
    """Gives SIGTERM back its usual effect, which starting jax.distributed has taken from it."""
    _jax_handler().release()


@functools.cache
def _watch():
    require_init()
    launcher = detect_launcher()
    is_alone = launcher is None or launcher.size == 1
    watch = _ProcessWatch() if is_alone else _RanksWatch()
    # A worker of multiprocessing that was forked must still end when it is terminated.
    os.register_at_fork(after_in_child=_restore_defaults)
    return watch


def _restore_defaults():
    for number in _NOTICES:
        signal.signal(number, signal.SIG_DFL)


class _Watch:
    """What this process knows of notices."""

    _is_time = False

    def ask(self) -> bool:
        if not self._is_time and self._has_come():
            self._is_time = True
            # The notice need not have come through mmrun, whose exit code is to tell of it.
            wire.notify(wire.Kind.NOTICE, {"signal": signal.SIGTERM})
        return self._is_time

    def _has_come(self) -> bool:
        raise NotImplementedError


class _ProcessWatch(_Watch):
    """Notices of a process on its own."""

    def __init__(self):
        self._was_told = False
        _handle_notices(self._hear)

    def _has_come(self):
        return self._was_told

    def _hear(self, number):
        self._was_told = True


class _RanksWatch(_Watch):
    """Notices of a job of several ranks."""

    def __init__(self):
        from jax.experimental import multihost_utils

        self._reached = multihost_utils.reached_preemption_sync_point
        self._calls = 0
        if any(callable(signal.getsignal(number)) for number in _NOTICES):
            _handle_notices(_jax_handler())
        else:
            # Not through Python, which would handle the signal only after the present step.
            _jax_handler().install(_NOTICES)

    def _has_come(self):
        self._calls += 1
        return self._reached(self._calls)


def _handle_notices(hear):
    """Has `hear(number)` called on a notice, after the handler that the program has set."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "multimesh.preempted must first be called in the main thread, where Python handles "
            f"signals. Got {threading.current_thread().name!r}; call it once before you start the "
            "thread."
        )
    for number in _NOTICES:
        previous = signal.getsignal(number)

        def handle(number, frame, previous=previous):
            hear(number)
            if callable(previous):
                previous(number, frame)

        signal.signal(number, handle)


@functools.cache
def _jax_handler() -> "_JaxHandler":
    return _JaxHandler()


class _JaxHandler:
    """The C function that JAX installs for SIGTERM; it tells JAX's preemption service.

    There is no other way to tell it.
    """

    def __init__(self):
        self._address = 0
        self._signal = ctypes.CDLL(None).signal
        self._signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self._signal.restype = ctypes.c_void_p

    def release(self):
        """Takes it out again, right after JAX has installed it."""
        self._address = self._signal(signal.SIGTERM, None)
        program_handler = signal.getsignal(signal.SIGTERM)
        if program_handler is not signal.SIG_DFL:
            # Python still has it; only the system does not know any more.
            signal.signal(signal.SIGTERM, program_handler)

    def install(self, numbers):
        """Has the system call it, in whatever code the process is, on these signals."""
        for number in numbers:
            self._signal(number, self._address)

    def __call__(self, number):
        ctypes.CFUNCTYPE(None, ctypes.c_int)(self._address)(number)
