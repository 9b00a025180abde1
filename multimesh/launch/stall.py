"""Finds out why a job does not go on, says so, and ends it.

In each rank of a job of several, a *listener* thread answers what other ranks ask: what does this
one do? It talks through `notices`, not through MPI, so it answers whatever the main thread is
stuck in. When a wait of ours has lasted for the stall timeout, the rank that waits asks all, has
rank 0 print the answers, and raises.

Other waits are not ours: in the user's own MPI calls, in a collective inside XLA whose peer is
gone, at the end for a rank that never ends. A *watcher* thread looks at the main thread from time
to time. When that has not moved for the stall timeout, and two inquiries show that no rank moves,
it ends the job.
"""

import functools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from multimesh import _compat
from multimesh.errors import StallError
from multimesh.launch import failure, wire
from multimesh.launch.activity import activity
from multimesh.launch.frames import OWN_THREADS, main_stack, stacks
from multimesh.launch.hang import Answer, Answers, find_culprit, is_stuck, may_be_late, report
from multimesh.launch.movement import Movement
from multimesh.launch.notices import Notices

__all__ = ["Monitor", "monitor"]

_SILENT_AFTER = 2.0  # seconds: a rank that has not answered by then does not run
_ASK_WITHIN = 2.5  # seconds for rank 0 to pass on a question
_AT_LEAST = 1.0  # seconds to answer, however long that took
_SECOND_CHANCE = 1.5  # seconds more for several that may just be late
_PRINT_WITHIN = 1.5  # seconds for rank 0 to print a report
_PASS_ON = 0.2  # seconds for what was printed to reach the screen before the job ends
_GIVE_WAY = 1.0  # seconds for the rank whose report is shown to end the job
_LOOK_EVERY = 2.0  # seconds at most
_LISTEN = 3600.0  # seconds for one call; then it listens again


class Monitor:
    """Watches this rank, and answers for it. Until it is started, it does nothing."""

    _notices: Notices
    _movement: Movement

    def __init__(self):
        self._rank = 0
        self._hosts: Sequence[str] = ()
        self._timeout = 0.0
        self._with_stacks = False
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()  # the programs of all ranks have ended
        self._is_printed = threading.Event()
        self._reporter: int | None = None  # the rank whose report is shown

    def start(self, rank: int, hosts: Sequence[str], timeout: float, *, with_stacks: bool):
        """Starts the listener and the watcher; jax.distributed must have been started.

        Args:
          rank: This rank.
          hosts: The host of each rank.
          timeout: Seconds without any movement after which a job is over.
          with_stacks: Whether the report shows Python stacks.
        """
        self._notices = Notices(_compat.coordination_store(), rank, len(hosts))
        self._rank, self._hosts = rank, hosts
        self._timeout, self._with_stacks = timeout, with_stacks
        self._movement = Movement()
        self._threads = [
            threading.Thread(target=self._listen, name=f"{OWN_THREADS} listener", daemon=True),
            threading.Thread(target=self._watch, name=f"{OWN_THREADS} watcher", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # What the main thread calls

    def report(self, title: str) -> int | None:
        """Has rank 0 print what every rank does, or prints it where rank 0 does not run.

        Args:
          title: What happened, as a sentence.

        Returns:
          The rank that the job hangs because of, where that is a single one.
        """
        if not self._threads:
            return None
        answers = self._inquire()
        self._publish(title, answers)
        return find_culprit(answers, self._rank, self._hosts)

    def give_way(self) -> None:
        """Lets one rank end the job, where several find the same fault at once: the first here."""
        if self._threads:
            self._notices.post(kind="report", rank=self._rank, text="")
            self._await_turn()

    def say_ended(self) -> None:
        """Tells the other ranks that this rank's program has ended, with exit code 0."""
        if self._threads:
            self._notices.post(kind="ended", rank=self._rank, steps=activity().steps)

    def stop(self) -> None:
        """Lets the threads end, once all ranks have said that they ended."""
        for thread in self._threads:
            thread.join(_SILENT_AFTER)

    # The listener

    def _listen(self):
        number = 1
        while not self._is_over.is_set():
            try:
                notice = self._notices.read(number, _LISTEN)
            except ConnectionError:
                return
            if notice is not None:
                self._hear(number, notice)
                number += 1

    def _hear(self, number, notice):
        match notice["kind"]:
            case "ask":
                self._notices.answer(number, **asdict(self._answer()))
            case "report" if self._reporter is None:
                self._reporter = notice["rank"]
                if self._rank == 0:
                    _print(notice["text"])
                    self._notices.post(kind="printed")
            case "printed":
                self._is_printed.set()
            case "ended":
                ended = activity().ended
                ended[notice["rank"]] = notice["steps"]
                if len(ended) == len(self._hosts):
                    self._is_over.set()

    def _answer(self) -> Answer:
        present = activity()
        sample, still = self._movement.look()
        return Answer(
            text=present.text(f"{sample.place} (for {still:.0f} s)"),
            still=still,
            is_waiting=sample.is_polling or present.is_in_step,
            waits_for=present.waits_for,
            stacks=stacks() if self._with_stacks else "",
        )

    # The watcher

    def _watch(self):
        half = self._timeout / 2
        due, before = half, None  # the next inquiry, and what the last one found
        while not self._is_over.wait(min(_LOOK_EVERY, self._timeout / 8)):
            _, still = self._movement.look()
            if still < half:
                due, before = half, None
            elif still >= due and not activity().has_time_limit:
                now = self._inquire()
                if before and is_stuck(before, now, len(self._hosts), self._timeout):
                    self._end_job(now)
                due, before = due + half, now

    def _end_job(self, answers: Answers):
        """Ends the job from this thread: the main thread will never do it."""
        title = f"No rank has moved for {self._timeout:g} s."
        self._publish(title, answers)
        text = (
            f"Traceback (most recent call last):\n{main_stack()}"
            f"{StallError.__module__}.{StallError.__name__}: {title} Rank {self._rank} is "
            f"{answers[self._rank].text}. Look for what the ranks wait for, or raise "
            "MULTIMESH_STALL_TIMEOUT.\n"
        )
        culprit = find_culprit(answers, self._rank, self._hosts)
        failing = {"code": 1, "traceback": text, "culprit": culprit}
        if not wire.notify(wire.Kind.FAILING, failing):
            _print(text)
        failure.leave(1)

    # Asking and telling

    def _inquire(self) -> Answers:
        answers = {self._rank: self._answer()}
        asked = time.monotonic()
        # Who cannot be asked knows nothing, so this is worth more time than other notices are.
        number = self._notices.post(within=_ASK_WITHIN, kind="ask")
        if number is not None:
            left = asked + _SILENT_AFTER - time.monotonic()
            found = self._notices.answers(number, max(left, _AT_LEAST))
            if may_be_late(found.keys() | answers.keys(), self._hosts):
                found = self._notices.answers(number, _SECOND_CHANCE)
            answers |= {rank: Answer(**fields) for rank, fields in found.items()}
        return answers

    def _publish(self, title, answers):
        """Has rank 0 print a report, unless another rank's came first."""
        text = report(title, answers, self._hosts)
        if 0 in answers and self._notices.post(kind="report", rank=self._rank, text=text):
            if not self._await_turn():
                _print(text)
        else:
            # Nobody can say whose report is the first: one rank after the other, then.
            time.sleep(_GIVE_WAY * min(max(0, self._rank - 1), 3) / 2)
            _print(text)
        time.sleep(_PASS_ON)

    def _await_turn(self) -> bool:
        """Waits until rank 0 has printed a report; gives way if it is another rank's.

        Returns:
          Whether rank 0 has printed one.
        """
        is_printed = self._is_printed.wait(_PRINT_WITHIN)
        if is_printed and self._reporter != self._rank:
            time.sleep(_GIVE_WAY)
        return is_printed


def _print(text):
    """Writes at once: in pieces, it could mix with what other ranks write."""
    sys.stderr.write(text)
    sys.stderr.flush()


@functools.cache
def monitor() -> Monitor:
    """The monitor of this process."""
    return Monitor()
