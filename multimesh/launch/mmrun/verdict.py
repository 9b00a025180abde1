"""What mmrun knows of each rank, and what that makes of the job. No input or output.

A job succeeded if every rank reported that its program ran to its end, with code 0. The first
report of anything else is the job's failure and gives it its exit code; what other ranks report
later is only its echo.

A job that was asked to end is different: its ranks have some time to do so, each in its own way.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from multimesh.launch.wire import Kind, Message

__all__ = ["Failure", "Request", "Verdict"]

# The ranks see a stall too, and can say more about it: they come first.
_RANKS_COME_FIRST = 4.0
# JAX aborts a rank when rank 0 is gone, and on a busy machine that may be heard of first.
_RANK_0_COMES_FIRST = 1.0


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


@dataclass(frozen=True)
class Request:
    """The job was asked to end.

    Attributes:
      kind: `Kind.PREEMPT` or `Kind.INTERRUPT`, as the ranks are told.
      signal: The name of the signal that asked for it.
      exit_code: The exit code of a job that ends as asked.
    """

    kind: Kind
    signal: str
    exit_code: int

    @classmethod
    def by(cls, number: int) -> "Request":
        """What signal `number` asks for."""
        kind = Kind.INTERRUPT if number == signal.SIGINT else Kind.PREEMPT
        # Whichever signal gave the notice, batch scripts test for one code.
        code = 128 + (signal.SIGINT if kind is Kind.INTERRUPT else signal.SIGTERM)
        return cls(kind, _signal_name(number), code)


@dataclass
class _Rank:
    host: str = "an unknown host"
    has_joined: bool = False
    is_python: bool = True
    has_finished: bool = False  # the Python program ran to its end
    is_gone: bool = False
    stop_signal: int = 0  # the signal that stopped its process, while it is stopped


@dataclass
class Verdict:
    """Collects the ranks' messages.

    Attributes:
      size: Number of ranks.
      grace: Seconds that ranks have to end once they were asked to.
      stall_timeout: Seconds that a rank's process may be stopped.
      failure: The first failure, once there is one: the job ends.
      request: That the job was asked to end, once it was.
    """

    size: int
    grace: float = 30.0
    stall_timeout: float = 120.0
    failure: Failure | None = None
    request: Request | None = None
    # What the job waits for: until when, on the monotonic clock, and what happens then.
    _limits: dict[object, tuple[float, Callable[[], None]]] = field(default_factory=dict)
    _traceback: tuple[int, str] | None = None  # the first of an interrupted rank
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def __post_init__(self):
        self._ranks = {rank: _Rank() for rank in range(self.size)}

    def hear(self, message: Message):
        """Takes a message of a rank; output is not for here."""
        number, rank = message.rank, self._ranks[message.rank]
        match message.kind:
            case Kind.HELLO:
                hello = message.json()
                rank.host, rank.is_python = hello["host"], hello["is_python"]
            case Kind.JOINING:
                self._join(rank, message.json()["timeout"])
            case Kind.FAILING:
                self._judge(number, rank, **message.json())
            case Kind.FINISHED:
                rank.has_finished = True
            case Kind.STOPPED:
                self._stop(number, rank, message.json()["signal"])
            case Kind.NOTICE:
                self.ask(Request.by(message.json()["signal"]))
            case Kind.EXIT:
                rank.is_gone = True
                self._limits.pop(number, None)
                self._judge(number, rank, **message.json())
                self._check_absent()

    def lose(self, number: int):
        """A rank's supervisor has closed its connection."""
        if self._ranks[number].is_gone:
            return
        place = self.place(number)
        if self.request is None:
            self.fail(number, f"{place} vanished without saying how it ended", 1)
        else:
            # srun ends all ranks with the first one that leaves without finalizing MPI.
            text = f"{_asked(self.request)}; {place} was killed by what had started it"
            self._fail_as_asked(self.request, text)

    def fail(self, rank: int | None, reason: str, exit_code: int, traceback: str = ""):
        """Records a failure, if it is the first."""
        if self.failure is None:
            self.failure = Failure(rank, reason, exit_code, traceback)

    def ask(self, request: Request):
        """The job was asked to end; only the first time counts."""
        if self.request is None:
            self.request = request
            text = f"{_asked(request)}; killed after {self.grace:g} s of grace"
            self._limit("grace", self.grace, lambda: self._fail_as_asked(request, text))

    def patience(self) -> float | None:
        """Seconds until `check_limits` has something to do, or None if nobody waits."""
        if not self._limits:
            return None
        return max(0.0, min(end for end, _ in self._limits.values()) - time.monotonic())

    def check_limits(self):
        """Fails if the time for something is over."""
        now = time.monotonic()
        for key, (end, act) in list(self._limits.items()):
            if now >= end:
                del self._limits[key]
                act()

    def close(self, mpiexec_code: int):
        """Everything has ended: whatever is not accounted for by now is a failure."""
        for number, state in self._ranks.items():
            # Its end was held back for that of rank 0, of which nothing more will be heard.
            if state.is_gone and number in self._limits:
                self._limits.pop(number)[1]()
        unheard = [rank for rank, state in self._ranks.items() if not state.is_gone]
        if unheard:
            code = mpiexec_code if 0 < mpiexec_code < 256 else 1
            places = ", ".join(map(self.place, unheard))
            how = f"code {code}" if mpiexec_code >= 0 else _signal_name(-mpiexec_code)
            self.fail(None, f"mpiexec ended with {how} before {places} could say why", code)
        elif self.request is not None:
            text = f"{_asked(self.request)}; all ranks ended in time"
            self._fail_as_asked(self.request, text)

    def are_all_gone(self) -> bool:
        """Whether every rank has reported its end."""
        return all(state.is_gone for state in self._ranks.values())

    def place(self, number: int) -> str:
        """A rank and its host, for a message."""
        return f"rank {number} on {self._ranks[number].host}"

    def stopped(self, number: int | None) -> str:
        """By which signal a rank's process is stopped, or "" if it is not, or is no rank's."""
        code = 0 if number is None else self._ranks[number].stop_signal
        return _signal_name(code) if code else ""

    def _fail_as_asked(self, request, text):
        rank, traceback = self._traceback or (None, "")
        self.fail(rank, text, request.exit_code, traceback)

    def _limit(self, key, seconds, act):
        self._limits[key] = (time.monotonic() + seconds, act)

    def _join(self, rank, timeout):
        rank.has_joined = True
        if all(state.has_joined for state in self._ranks.values()):
            self._limits.pop("join", None)
        elif "join" not in self._limits:
            self._limit("join", timeout, lambda: self._miss(timeout))
        self._check_absent()

    def _miss(self, timeout):
        missing = [rank for rank, state in self._ranks.items() if not state.has_joined]
        self.fail(
            missing[0],
            f"{', '.join(map(self.place, missing))} did not call multimesh.init within "
            f"{timeout:g} s of the first rank that did. Call it on every rank, or raise "
            "initialization_timeout= of init, or MULTIMESH_START_TIMEOUT",
            1,
        )

    def _check_absent(self):
        """Fails if ranks wait in `init` for one that has ended without calling it."""
        if self.request is None and any(state.has_joined for state in self._ranks.values()):
            for number, state in self._ranks.items():
                if state.is_gone and not state.has_joined:
                    self.fail(
                        number,
                        f"{self.place(number)} ended with exit code 0 before it called "
                        "multimesh.init, where other ranks wait for it",
                        1,
                    )

    def _stop(self, number, rank, stop_signal):
        rank.stop_signal = stop_signal
        self._limits.pop(number, None)
        if stop_signal:
            text = (
                f"{self.place(number)} was stopped by {self.stopped(number)}, and did not go on "
                f"within {self.stall_timeout:g} s"
            )
            seconds = self.stall_timeout + _RANKS_COME_FIRST
            self._limit(number, seconds, lambda: self.fail(number, text, 1))

    def _judge(self, number, rank, *, code, signal=0, traceback="", culprit=None):
        place = self.place(number)
        if self.request and self._is_as_asked(self.request, number, code, signal, traceback):
            return
        culprit = self._revise(culprit)
        if culprit is not None and culprit != number:
            text = f"{self._state(culprit)} while {place} waited for it"
            self.fail(number, text, code, traceback)
        elif signal:
            text = f"{place} was killed by {_signal_name(signal)}: exit code {code}"
            if self._may_be_echo(number, signal):
                self._limit(number, _RANK_0_COMES_FIRST, lambda: self.fail(number, text, code))
            else:
                self.fail(number, text, code)
        elif code:
            self.fail(number, f"{place} failed with exit code {code}", code, traceback)
        elif rank.is_python and not rank.has_finished:
            self.fail(number, f"{place} left with exit code 0 before its program had ended", 1)

    def _revise(self, culprit: int | None) -> int | None:
        """The rank that a job hangs because of: one whose process is stopped, if there is any."""
        stopped = [number for number, rank in self._ranks.items() if rank.stop_signal]
        return stopped[0] if culprit is not None and stopped else culprit

    def _may_be_echo(self, number, number_of_signal) -> bool:
        """Whether a rank may have been aborted because rank 0, which JAX needs, is gone."""
        joined = self._ranks[number].has_joined
        return number_of_signal == signal.SIGABRT and joined and number != 0

    def _is_as_asked(self, request, number, code, number_of_signal, traceback) -> bool:
        """Whether a rank ends in a way that is no failure of a job that was asked to end."""
        if request.kind is Kind.INTERRUPT:
            if traceback and self._traceback is None:
                self._traceback = number, traceback
            return True
        if number_of_signal == signal.SIGTERM:
            # A program that does not care for notices ends by them, and the job with it.
            self.fail(None, f"stopped by {request.signal}", request.exit_code)
        return code == request.exit_code

    def _state(self, number):
        state = self._ranks[number]
        if state.stop_signal:
            return f"{self.place(number)} was stopped by {_signal_name(state.stop_signal)}"
        if state.has_finished or state.is_gone:
            return f"{self.place(number)} ended with exit code 0"
        return f"{self.place(number)} did not go on"


def _asked(request):
    verb = "interrupted" if request.kind is Kind.INTERRUPT else "preempted"
    return f"{verb} by {request.signal}"


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
