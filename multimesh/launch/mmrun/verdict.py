"""What mmrun knows of each rank, and what that makes of the job. No input or output.

A job succeeded if every rank reported that its program ran to its end, with code 0. The first
report of anything else is the job's failure and gives it its exit code; what other ranks report
later is only its echo.
"""

import signal
import time
from dataclasses import dataclass, field

from multimesh.launch.wire import Kind, Message

__all__ = ["Failure", "Verdict"]


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong.

    Attributes:
      rank: The rank that failed, or None if it was none of them.
      reason: What happened, to be read after "mmrun: ".
      exit_code: The exit code of the job, never 0.
      traceback: The exception that ended the rank, or "".
    """

    rank: int | None
    reason: str
    exit_code: int
    traceback: str = ""


@dataclass
class _Rank:
    host: str = "an unknown host"
    has_joined: bool = False
    is_python: bool = True
    has_finished: bool = False  # the Python program ran to its end
    is_gone: bool = False


@dataclass
class Verdict:
    """Collects the ranks' messages.

    Attributes:
      size: Number of ranks.
      failure: The first failure, once there is one.
      join_deadline: When all ranks must have called `init`, on the monotonic clock; None while
        no rank waits for another.
    """

    size: int
    failure: Failure | None = None
    join_deadline: float | None = None
    _join_timeout: float = 0.0
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def __post_init__(self):
        self._ranks = {rank: _Rank() for rank in range(self.size)}

    def hear(self, message: Message):
        """Takes a message of a rank; output is not for here."""
        rank = self._ranks[message.rank]
        match message.kind:
            case Kind.HELLO:
                hello = message.json()
                rank.host, rank.is_python = hello["host"], hello["is_python"]
            case Kind.JOINING:
                self._join(rank, message.json()["timeout"])
            case Kind.FAILING:
                self._judge(message.rank, rank, **message.json())
            case Kind.FINISHED:
                rank.has_finished = True
            case Kind.EXIT:
                rank.is_gone = True
                self._judge(message.rank, rank, **message.json())

    def lose(self, rank: int):
        """A rank's supervisor has closed its connection."""
        if not self._ranks[rank].is_gone:
            host = self._ranks[rank].host
            self.fail(rank, f"rank {rank} on {host} vanished without saying how it ended", 1)

    def fail(self, rank: int | None, reason: str, exit_code: int, traceback: str = ""):
        """Records a failure, if it is the first."""
        if self.failure is None:
            self.failure = Failure(rank, reason, exit_code, traceback)

    def check_join(self):
        """Fails if the time for all ranks to call `init` is over."""
        if self.join_deadline is None or time.monotonic() < self.join_deadline:
            return
        missing = [rank for rank, state in self._ranks.items() if not state.has_joined]
        names = ", ".join(f"rank {rank} on {self._ranks[rank].host}" for rank in missing)
        self.fail(
            missing[0],
            f"{names} did not call multimesh.init within {self._join_timeout:g} s of the first "
            "rank that did. Call it on every rank, or raise MULTIMESH_START_TIMEOUT",
            1,
        )

    def close(self, mpiexec_code: int):
        """Everything has ended: whatever is not accounted for by now is a failure."""
        unheard = [rank for rank, state in self._ranks.items() if not state.is_gone]
        if unheard:
            code = mpiexec_code if 0 < mpiexec_code < 256 else 1
            self.fail(None, f"mpiexec ended with code {mpiexec_code}; no word of {unheard}", code)

    def _join(self, rank, timeout):
        rank.has_joined = True
        if all(state.has_joined for state in self._ranks.values()):
            self.join_deadline = None
        elif self.join_deadline is None:
            self._join_timeout = timeout
            self.join_deadline = time.monotonic() + timeout

    def _judge(self, number, rank, *, code, signal=0, traceback=""):
        place = f"rank {number} on {rank.host}"
        if signal:
            self.fail(
                number, f"{place} was killed by {_signal_name(signal)}: exit code {code}", code
            )
        elif code:
            self.fail(number, f"{place} failed with exit code {code}", code, traceback)
        elif rank.is_python and not rank.has_finished:
            self.fail(number, f"{place} left with exit code 0 before its program had ended", 1)


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
