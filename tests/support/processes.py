"""Finds a job's processes, whatever started them, by a variable in their environment."""

import time
from pathlib import Path

__all__ = ["none_left", "with_variable"]


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
