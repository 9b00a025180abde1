"""Shows the output of all ranks: whole lines, each with its rank in front.

There is one writer, so lines of different ranks never mix. A line is shown when it is final (see
`rows`). On a terminal, what rank 0 has not finished is shown at the bottom (see `screen`).
"""

import contextlib
import os

from multimesh.errors import StartupError
from multimesh.launch.mmrun.logs import Logs
from multimesh.launch.mmrun.options import Options
from multimesh.launch.mmrun.rows import Rows
from multimesh.launch.mmrun.screen import ERRORS, LONGEST_ROW, OUTPUT, Screen, rank_environment

__all__ = ["ERRORS", "OUTPUT", "Console"]


class Console:
    """Takes the bytes that ranks write and shows them as lines."""

    def __init__(
        self,
        screen: Screen | None = None,
        *,
        prefix: bool = True,
        only_rank: int | None = None,
        logs: Logs | None = None,
    ):
        """A console that has heard nothing yet.

        Args:
          screen: Where to show it; by default standard output and error, as no terminals.
          prefix: Whether lines have their rank in front.
          only_rank: The one rank whose output is shown, or None for all.
          logs: Files that get all lines too, or None.
        """
        self._screen = screen or Screen()
        self._has_prefix = prefix
        self._only = only_rank  # the user's choice
        self._heard: int | None = None  # after a failure: the rank whose last words count
        self._logs = logs
        self._outputs: dict[tuple[int, int], Rows] = {}

    @classmethod
    def from_options(cls, options: Options, size: int) -> "Console":
        """The console of a job.

        Args:
          options: mmrun's; read are `prefix`, `only_rank` and `log_dir`.
          size: The number of ranks.

        Raises:
          StartupError: If there is no rank `only_rank`, or `log_dir` cannot be written.
        """
        if options.only_rank is not None and options.only_rank >= size:
            raise StartupError(
                f"--only-rank {options.only_rank}: expected a rank from 0 to {size - 1}, since the "
                f"job has {size} ranks."
            )
        return cls(
            Screen.on_standard_output(os.environ),
            prefix=options.prefix,
            only_rank=options.only_rank,
            logs=Logs(options.log_dir, size) if options.log_dir is not None else None,
        )

    def rank_environment(self, environ: dict[str, str]) -> dict[str, str]:
        """The variables to add to the ranks' environment: the width and height of a terminal."""
        width = len(f"[{self._live_rank}] ") if self._has_prefix else 0
        return rank_environment(self._screen.size, width, environ)

    # What ranks write

    def feed(self, rank: int, fd: int, data: bytes):
        """Takes the next bytes that a rank wrote to `OUTPUT` or `ERRORS`."""
        if self._logs or self._is_shown(rank):
            rows = self._outputs.get((rank, fd))
            if rows is None:
                rows = self._outputs[rank, fd] = Rows()
            self._write(rank, fd, rows.feed(data))

    def finish(self, rank: int):
        """Writes what a rank left without a newline at its end."""
        for fd in (OUTPUT, ERRORS):
            if (rank, fd) in self._outputs:
                self._write(rank, fd, self._outputs.pop((rank, fd)).finish())

    def hear_only(self, rank: int | None):
        """Shows from now on, after a failure, only the last words of the rank that failed.

        Args:
          rank: That rank, or None if no rank has failed: then nothing changes.
        """
        if rank is not None:
            for other in sorted({other for other, _ in self._outputs} - {rank}):
                self.finish(other)
        self._heard = rank

    # What mmrun says

    def show(self, rank: int, text: bytes):
        """Writes a text of several lines as a rank's errors, whatever ranks are shown."""
        self._show(rank, ERRORS, text.rstrip(b"\n") + b"\n")

    def say(self, text: str):
        """Writes a line of mmrun's own."""
        self.pass_on(text.encode(errors="backslashreplace") + b"\n")

    def pass_on(self, data: bytes):
        """Writes bytes of mpiexec's or mmrun's own, as they are."""
        self._screen.write(ERRORS, data, self._live_rows())

    def close(self):
        """Writes what is left of all ranks, and closes the log files."""
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: the job has ended for that
            for rank in sorted({rank for rank, _ in self._outputs}):
                self.finish(rank)
        if self._logs:
            self._logs.close()

    # Inside

    @property
    def _live_rank(self):
        return self._only or 0

    def _is_shown(self, rank):
        return self._only in (None, rank) and self._heard in (None, rank)

    def _write(self, rank, fd, lines):
        if self._logs and lines and (problem := self._logs.write(rank, lines)):
            self.say(f"mmrun: {problem}")
        if self._is_shown(rank):
            self._show(rank, fd, lines)

    def _show(self, rank, fd, lines):
        if lines:
            prefix = self._prefix(fd, rank)
            lines = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        self._screen.write(fd, lines, self._live_rows())

    def _prefix(self, fd, rank):
        text = b"[%d]" % rank if self._has_prefix else b""
        return self._screen.coloured(fd, rank, text) + b" " * bool(text)

    def _live_rows(self):
        """What the rank at the bottom of the terminal has not finished."""
        if not self._screen.has_live_rows or not self._is_shown(self._live_rank):
            return []
        prefix = self._prefix(ERRORS, self._live_rank)
        for fd in (ERRORS, OUTPUT):
            rows = self._outputs.get((self._live_rank, fd))
            if rows and (unfinished := rows.unfinished(LONGEST_ROW)):
                return [prefix + row for row in unfinished]
        return []
