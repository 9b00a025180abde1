"""Whether this rank moves: what its main thread does, and how much processor time it takes.

A main thread that sits in one call may be computing there, compiling, or waiting for somebody who
never comes. Only the last takes no processor time, unless MPI polls.
"""

import threading
import time
from dataclasses import dataclass

from multimesh.launch.activity import activity
from multimesh.launch.frames import main_position

__all__ = ["Movement", "Sample", "has_moved"]

# A share of one core: more than idle threads take, less than compiling or loading data does.
_IDLE = 0.05
_SHORTEST = 0.1  # seconds: over less, the processor time of looking would count


@dataclass(frozen=True)
class Sample:
    """This rank at one moment.

    Attributes:
      mark: Equal marks: the main thread is where it was.
      place: Where that is in the user's code, for people.
      is_polling: Whether it waits for other ranks, and may take processor time for that.
      processor: Seconds of processor time that the process has used.
      at: Seconds on the monotonic clock.
    """

    mark: object
    place: str
    is_polling: bool
    processor: float
    at: float


def has_moved(before: Sample, after: Sample) -> bool:
    """Whether a rank has done anything between two samples."""
    if before.mark != after.mark:
        return True
    used = after.processor - before.processor
    return not after.is_polling and used > _IDLE * (after.at - before.at)


class Movement:
    """Notes since when this rank has not moved. Any thread may look."""

    def __init__(self):
        self._lock = threading.Lock()
        self._last = _sample()
        self._still_since = self._last.at

    def look(self) -> tuple[Sample, float]:
        """Takes a sample.

        Returns:
          The sample, and for how many seconds the rank has not moved.
        """
        with self._lock:
            present = _sample()
            if present.at - self._last.at > _SHORTEST or present.mark != self._last.mark:
                if has_moved(self._last, present):
                    self._still_since = present.at
                self._last = present
            return present, present.at - self._still_since


def _sample():
    present, position = activity(), main_position()
    wait = present.wait
    # Where a wait of our own polls, the code moves, but the program does not.
    place = position.mark if wait is None else wait.since
    return Sample(
        mark=(present.steps, present.instruction, place),
        place=position.text,
        is_polling=wait is not None or position.is_mpi_wait,
        processor=time.process_time(),
        at=time.monotonic(),
    )
