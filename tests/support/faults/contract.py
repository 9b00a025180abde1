"""What must hold of a job with a fault, whatever the fault.

Each promise is a function from the cell and its end to what is wrong; an empty text is kept.
"""

import re
import socket

from support.faults.cells import Cell
from support.faults.job import Ended
from support.faults.timing import CLEANUP_SECONDS, promised_seconds

__all__ = ["PROMISES", "broken_promises"]

# Not the announcement that a rank "is stopped": it may go on again.
_SUMMARY = re.compile(r"mmrun: (?!.* is stopped by ).*\brank \d+ on ")
_CHAINED = r"The above exception was the direct cause|During handling of the above exception"


def ends_in_time(cell: Cell, ended: Ended) -> str:
    if ended.code is None:
        return "the job did not end by itself"
    limit = promised_seconds(cell)
    return "" if ended.seconds <= limit else f"took {ended.seconds:.1f} s, more than {limit:g} s"


def fails(cell: Cell, ended: Ended) -> str:
    return "exit code 0" if ended.code == 0 else ""


def has_the_code_of_the_fault(cell: Cell, ended: Ended) -> str:
    if not ended.code or cell.kind.code in (None, ended.code):
        return ""
    return f"exit code {ended.code}, not {cell.kind.code}"


def shows_its_traceback_once(cell: Cell, ended: Ended) -> str:
    tracebacks = ended.output.count("Traceback (most recent call last)")
    tracebacks -= len(re.findall(_CHAINED, ended.output))
    is_shown = f"InjectedFault: {cell.kind.name}\n" in ended.output
    if cell.kind.has_traceback:
        if is_shown and tracebacks == 1:
            return ""
        return f"{tracebacks} tracebacks, {'' if is_shown else 'not '}with its own"
    # Nothing was raised here; another rank may say that it waited in vain, once.
    may_stall = cell.kind.is_silent or cell.kind.leaves_with_0
    if tracebacks <= may_stall and ("StallError: " in ended.output or not tracebacks):
        return ""
    return f"{tracebacks} tracebacks of other ranks"


def says_it_in_one_last_line(cell: Cell, ended: Ended) -> str:
    if not cell.launcher.is_mmrun:
        return ""
    place = f"rank {cell.place.rank} on {socket.gethostname()}"
    lines = ended.stderr.splitlines() or [""]
    summaries = [line for line in lines if _SUMMARY.match(line)]
    if len(summaries) != 1 or lines[-1] != summaries[0] or place not in lines[-1]:
        return f"no single last line that names {place}, but {summaries}"
    # The job's code, or the 0 that was not due and became a 1.
    told = re.findall(r"\bcode (\d+)\b", lines[-1])
    due = {str(ended.code), "0"} if cell.kind.leaves_with_0 else {str(ended.code)}
    if not cell.kind.is_silent and not due.intersection(told):
        return f"the last line does not name the code: {lines[-1]}"
    if cell.kind.has_traceback and "InjectedFault" not in lines[-2]:
        return f"something stands between the traceback and the last line: {lines[-2]!r}"
    return ""


def leaves_no_process(cell: Cell, ended: Ended) -> str:
    return f"{CLEANUP_SECONDS} s later there are {ended.left}" if ended.left else ""


PROMISES = {
    "end": ends_in_time,
    "failure": fails,
    "code": has_the_code_of_the_fault,
    "traceback": shows_its_traceback_once,
    "summary": says_it_in_one_last_line,
    "processes": leaves_no_process,
}


def broken_promises(cell: Cell, ended: Ended) -> dict[str, str]:
    """What is wrong, by the promise that is broken; empty if all is well."""
    if ended.seconds is None:
        return {"fault": "it never struck"}
    found = {name: holds(cell, ended) for name, holds in PROMISES.items()}
    return {name: problem for name, problem in found.items() if problem}
