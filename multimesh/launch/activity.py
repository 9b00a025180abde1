"""What this rank does now: noted in passing, and put into words only when somebody asks.

The executor notes each instruction by a number, and a wait that does not end at once is noted by
those who wait. A hang then tells on every rank what it was about (`stall` asks and reports).
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["Activity", "Wait", "activity", "name_ranks"]

_NAMED = 8  # ranks in a message


@dataclass(frozen=True)
class Wait:
    """A wait for other ranks.

    Attributes:
      ranks: The ranks that it is for.
      until: What they are to do, such as "send microbatch 2 of F0 -> F1 to rank 1".
      since: When it began, on the monotonic clock.
    """

    ranks: tuple[int, ...] = ()
    until: str = ""
    since: float = field(default_factory=time.monotonic)


class Activity:
    """What this rank does.

    Attributes:
      steps: How many steps have begun.
      instruction: The number of the instruction that runs in the present step.
      wait: The present wait for other ranks, once it has lasted a moment.
      is_ending: Whether the program has come to its end, where it waits for those of other ranks.
      ended: The ranks whose programs have ended, each with the steps that it had run.
    """

    def __init__(self):
        self.steps = 0
        self.instruction = 0
        self.wait: Wait | None = None
        self.is_ending = False
        self.ended: dict[int, int] = {}
        self._describe: Callable[[int], str] | None = None  # only within a step

    @property
    def is_in_step(self) -> bool:
        """Whether a step runs."""
        return self._describe is not None

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The ranks of the present wait. At its end, a rank waits for those that have not ended."""
        ranks = self.wait.ranks if self.wait is not None else ()
        return tuple(rank for rank in ranks if not (self.is_ending and rank in self.ended))

    @property
    def has_time_limit(self) -> bool:
        """Whether the rank waits in a way that ends with an error when it takes too long."""
        return self.wait is not None and not self.is_ending

    @contextlib.contextmanager
    def step(self, describe: Callable[[int], str]) -> Iterator[None]:
        """Within this context, a step runs, and its executor sets `instruction`.

        Args:
          describe: Puts an instruction into words, given its number.
        """
        self.steps += 1
        self.instruction = 0
        self._describe = describe
        try:
            yield
        finally:
            self._describe = None

    @contextlib.contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Within this context, the rank waits for others."""
        self.wait = wait
        try:
            yield
        finally:
            self.wait = None

    def ended_among(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` whose programs have ended."""
        return [rank for rank in ranks if rank in self.ended]

    def last_finished(self) -> str:
        """The last instruction that this rank finished, in words."""
        describe, number = self._describe, self.instruction
        if describe is None:
            return f"step {self.steps}" if self.steps else "none"
        return describe(number - 1) if number else f"none of step {self.steps}"

    def text(self, place: str) -> str:
        """What this rank does, in words.

        Args:
          place: Where its main thread is in the Python code, if it does not wait.
        """
        # Another thread goes on meanwhile: each attribute is read once.
        describe, number, wait = self._describe, self.instruction, self.wait
        doing = place
        if wait is not None:
            seconds = time.monotonic() - wait.since
            doing = f"waits {seconds:.1f} s for {name_ranks(self.waits_for)} to {wait.until}"
        if describe is None:
            where = "at its end" if self.is_ending else "outside a step"
            return f"{where}, {self.steps} steps done: {doing}"
        return (
            f"in step {self.steps}, {describe(number)}: {doing}; the last instruction that it "
            f"finished: {self.last_finished()}"
        )


@functools.cache
def activity() -> Activity:
    """The activity of this process."""
    return Activity()


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a message: "rank 1", "ranks 0, 2", "ranks 0, 1, 2, 3 and 60 more"."""
    names = [str(rank) for rank in ranks]
    shown = names[:_NAMED]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"
