"""How long a job with a fault may take, in seconds.

A fault that somebody sees ends the job promptly. If nobody does, the other ranks arrive where they
wait, a timeout passes, and a moment later the job has ended.
"""

from support.faults.cells import Cell
from support.faults.limits import PROMPT, excused_promises

__all__ = ["CLEANUP_SECONDS", "START_TIMEOUT", "promised_seconds", "stall_timeout"]

PROMPT_SECONDS = 10
ARRIVAL_SECONDS = 5
NOTICE_SECONDS = 5
CLEANUP_SECONDS = 5  # for the job's processes, after its end
START_TIMEOUT = 15
STALL_TIMEOUT = 8
# Where no timeout should be what ends the job.
LONG_STALL_TIMEOUT = 60


def is_prompt(cell: Cell) -> bool:
    """Whether somebody sees the fault itself, so that no timeout has to pass."""
    return not cell.kind.is_silent and PROMPT not in excused_promises(cell)


def stall_timeout(cell: Cell) -> float:
    """The stall timeout of a cell's job."""
    return LONG_STALL_TIMEOUT if is_prompt(cell) else STALL_TIMEOUT


def promised_seconds(cell: Cell) -> float:
    """Within how many seconds of the fault the job must end."""
    if is_prompt(cell):
        return PROMPT_SECONDS
    timeout = START_TIMEOUT if cell.moment == "before-init" else STALL_TIMEOUT
    return ARRIVAL_SECONDS + timeout + NOTICE_SECONDS
