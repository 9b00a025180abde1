"""Where this process is in its Python code, seen from another thread.

A program that hangs in code of its own says so in no other way: it sits in one call, perhaps one
of mpi4py's, and never moves.
"""

import dis
import faulthandler
import functools
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import IO, NamedTuple

__all__ = ["OWN_THREADS", "Position", "main_position", "main_stack", "stacks"]

OWN_THREADS = "multimesh"  # the names of this package's own threads begin so

# mpi4py's methods that may wait for other ranks: recv of pickles, Recv of buffers, and the like.
_MPI_WAIT = re.compile(
    "s?send|recv|sendrecv(_replace)?|m?probe|wait(any|all|some)?|barrier|bcast|(all)?gatherv?"
    "|scatterv?|alltoall[vw]?|(all)?reduce|reduce_scatter(_block)?|(ex)?scan|dup",
    re.IGNORECASE,
)
# What faulthandler writes.
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\S+) in (.*)')
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
        os.path.dirname(os.path.dirname(__file__)),
    )
)


@dataclass(frozen=True)
class Position:
    """Where the main thread is.

    Attributes:
      mark: Differs, almost surely, when the program has moved meanwhile.
      text: The innermost line of the user's own code, for people.
      is_mpi_wait: Whether it is in a call of mpi4py that may wait for other ranks.
    """

    mark: int
    text: str
    is_mpi_wait: bool


def main_position() -> Position:
    """Where the main thread is now. Threads that keep the process alive count for its mark."""
    main = threading.main_thread()
    innermost = sys._current_frames()[main.ident or 0]
    instruction = innermost.f_code, innermost.f_lasti
    method = _called_method(*instruction)
    is_mpi_wait = "mpi4py.MPI" in sys.modules and bool(_MPI_WAIT.fullmatch(method))
    calls = _calls()
    others = (t.ident for t in threading.enumerate() if t is not main and not t.daemon)
    mark = hash((instruction, *(tuple(calls.get(each, ())) for each in (main.ident, *others))))
    return Position(mark, _describe(calls.get(main.ident, [])), is_mpi_wait)


def main_stack() -> str:
    """The stack of the main thread as in a traceback, from the user's program on."""
    return _stack(_calls(), threading.main_thread())


def stacks() -> str:
    """The stacks of all Python threads but those of this package, innermost call last."""
    calls = _calls()
    return "".join(
        f"Thread {thread.name}:\n{_stack(calls, thread)}"
        for thread in threading.enumerate()
        if not thread.name.startswith(OWN_THREADS)
    )


class _Call(NamedTuple):
    """A call on a stack: where it has come to."""

    filename: str
    line: int
    function: str


def _calls() -> dict[int | None, list[_Call]]:
    """The calls that each thread is in, innermost first, by the thread's identifier.

    `faulthandler` reads all stacks at once. To follow `f_back` of another thread's frame takes many
    steps of Python, between which that thread goes on; now and then CPython 3.11 then returned
    something that was no frame.
    """
    with _scratch_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found: dict[int | None, list[_Call]] = {}
    calls: list[_Call] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            calls = found.setdefault(int(thread[1], 16), [])
        elif call := _CALL.fullmatch(line):
            filename, number, function = call.groups()
            calls.append(_Call(filename, int(number) if number.isdecimal() else 0, function))
    return found


def _scratch_file() -> IO[bytes]:
    """A file that nobody else sees: in memory, for a slow or full disk must not silence a rank."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _stack(calls: Mapping[int | None, list[_Call]], thread: threading.Thread) -> str:
    stack = calls.get(thread.ident, [])[::-1]
    own = [place for place, call in enumerate(stack) if not _is_library(call.filename)]
    shown = [_summary(call) for call in stack[own[0] if own else 0 :]]
    return "".join(traceback.format_list(shown))


def _summary(call: _Call) -> traceback.FrameSummary:
    return traceback.FrameSummary(call.filename, call.line, call.function)


def _describe(calls: Sequence[_Call]) -> str:
    own = [call for call in calls if not _is_library(call.filename)]
    if not calls:
        return "nowhere in Python"
    summary = _summary((own or calls)[0])
    return f"{os.path.basename(summary.filename)}:{summary.lineno}: {summary.line or summary.name}"


def _is_library(filename: str) -> bool:
    return filename.startswith((*_LIBRARIES, "<frozen"))


@functools.lru_cache(maxsize=64)
def _called_method(code: CodeType, at: int) -> str:
    """The name of the method whose call is the instruction at offset `at`, or ""."""
    attributes = {}
    for instruction in dis.get_instructions(code):
        place = instruction.positions
        start = place and (place.lineno, place.col_offset)
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            # In `a.b.c(...)`, b and c begin where the call begins, and c comes last.
            attributes[start] = instruction.argval
        if instruction.offset >= at:
            is_call = instruction.opname.startswith("CALL")
            return attributes.get(start, "") if is_call else ""
    return ""
