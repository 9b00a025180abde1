"""Where this process is in its Python code, seen from another thread.

A program that hangs in code of its own says so in no other way: it sits in one call, perhaps one
of mpi4py's, and never moves.
"""

import dis
import functools
import os
import re
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from types import CodeType, FrameType

__all__ = ["OWN_THREADS", "Position", "main_position", "main_stack", "stacks"]

OWN_THREADS = "multimesh"  # the names of this package's own threads begin so

# mpi4py's methods that may wait for other ranks: recv of pickles, Recv of buffers, and the like.
_MPI_WAIT = re.compile(
    "s?send|recv|sendrecv(_replace)?|m?probe|wait(any|all|some)?|barrier|bcast|(all)?gatherv?"
    "|scatterv?|alltoall[vw]?|(all)?reduce|reduce_scatter(_block)?|(ex)?scan|dup",
    re.IGNORECASE,
)
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
    others = (t for t in threading.enumerate() if t is not main and not t.daemon)
    method = _called_method(innermost.f_code, innermost.f_lasti)
    is_mpi_wait = "mpi4py.MPI" in sys.modules and bool(_MPI_WAIT.fullmatch(method))
    mark = hash((_chain(innermost), *(_chain(_innermost(thread)) for thread in others)))
    return Position(mark, _describe(innermost), is_mpi_wait)


def main_stack() -> str:
    """The stack of the main thread as in a traceback, from the user's program on."""
    return _stack(threading.main_thread())


def stacks() -> str:
    """The stacks of all Python threads but those of this package, innermost call last."""
    return "".join(
        f"Thread {thread.name}:\n{_stack(thread)}"
        for thread in threading.enumerate()
        if not thread.name.startswith(OWN_THREADS)
    )


def _stack(thread):
    stack = traceback.extract_stack(_innermost(thread))
    own = [place for place, call in enumerate(stack) if not _is_library(call.filename)]
    return "".join(traceback.format_list(stack[own[0] if own else 0 :]))


def _innermost(thread: threading.Thread) -> FrameType | None:
    """The frame of the call that a thread is in; None if it has just ended."""
    return sys._current_frames().get(thread.ident or 0)


def _chain(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Every call on a stack, by its code and the instruction that it has come to."""
    chain = []
    while frame is not None:
        chain.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


def _describe(innermost: FrameType) -> str:
    frame: FrameType | None = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    summary = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
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
