"""Processes that end with the one that started them, whatever either of them does.

Linux can do this: a process asks to die with its parent, adopts what its descendants leave
behind, and finds every process in /proc. Elsewhere these functions do as much as they can.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["adopt_orphans", "die_with_parent", "kill_descendants", "kill_tagged"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A process that does not die of SIGKILL within this time hangs in the kernel; leave it there.
_KILL_SECONDS = 2.0
_POLL_SECONDS = 0.005


def die_with_parent(parent: int):
    """Has this process killed when its parent dies.

    Args:
      parent: The parent's process id: it may already be gone.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def adopt_orphans():
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants():
    """Kills every descendant of this process, and returns when they are gone.

    A process group does not reach them all: a descendant may have left it.
    """
    _kill_all(_descendants)


def kill_tagged(variable: str, value: str):
    """Kills every other process of this host that was started with `variable=value`."""
    tag = f"{variable}={value}".encode()
    _kill_all(lambda: _processes_with(tag))


def _prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_all(find):
    deadline = time.monotonic() + _KILL_SECONDS
    # Found again after each round: a process may have started another before it was killed.
    while (found := list(find())) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    alive = set()
    for process, state, parent in _all_processes():
        children.setdefault(parent, []).append(process)
        if state not in "ZX":
            alive.add(process)
    found, unvisited = [], [os.getpid()]
    while unvisited:
        offspring = children.get(unvisited.pop(), [])
        found += offspring
        unvisited += offspring
    return [process for process in found if process in alive]


def _all_processes() -> Iterator[tuple[int, str, int]]:
    """Yields the id, the state and the parent's id of each process."""
    for folder in _process_folders():
        with contextlib.suppress(OSError):
            # The name, in parentheses, may itself contain anything.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            yield int(folder.name), state, int(parent)


def _processes_with(tag: bytes) -> Iterator[int]:
    for folder in _process_folders():
        with contextlib.suppress(OSError):
            if tag in (folder / "environ").read_bytes().split(b"\0"):
                process = int(folder.name)
                if process != os.getpid():
                    yield process


def _process_folders() -> Iterable[Path]:
    return Path("/proc").glob("[0-9]*")
