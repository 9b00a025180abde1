"""Looks at processes: those of a job, by a variable in their environment, and single ones."""

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["is_alive", "none_left", "status", "wait_until", "with_variable"]


def with_variable(name: str, value: str) -> dict[int, str]:
    """The command lines of the processes that have `name=value` in their environment."""
    found = {}
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:  # a zombie's environment is empty
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = words.decode(errors="replace").strip()
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def none_left(name: str, value: str, seconds: float = 5) -> bool:
    """Whether no process with `name=value` is left, after some seconds at most."""
    deadline = time.monotonic() + seconds
    while with_variable(name, value):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Waits for a condition, and fails if it has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def status(pid: int) -> tuple[str, int | None]:
    """The state of a process, one letter, and its parent's id; "gone" once it is."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except FileNotFoundError:
        return "gone", None
    return state, int(parent)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return status(pid)[0] not in ("Z", "gone")
