"""Shows the output of all ranks: whole lines, each with its rank in front.

There is one writer, so lines of different ranks never mix. A line counts as whole at its newline;
a progress bar, which redraws itself with carriage returns, is kept to its latest state. On a
terminal, what rank 0 has written since its last newline is shown at the bottom (see `screen`).
"""

import contextlib
import os
import re

from multimesh.launch.mmrun.chatter import ChatterFilter
from multimesh.launch.mmrun.logs import Logs
from multimesh.launch.mmrun.options import Options
from multimesh.launch.mmrun.screen import ERRORS, LONGEST_ROW, OUTPUT, Screen, rank_environment

__all__ = ["ERRORS", "OUTPUT", "Console"]

# A program that never writes a newline must not fill mmrun's memory.
_LONGEST_LINE = 1 << 24
# A bar may erase its old state before it draws the new one, and so would erase its prefix.
_ERASING = re.compile(rb"(?:\x1b\[(?:[012]?K|\d*A))+")


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
        self._streams: dict[tuple[int, int], _Stream] = {}

    @classmethod
    def from_options(cls, options: Options, size: int) -> "Console":
        """The console of a job.

        Args:
          options: mmrun's; read are `prefix`, `only_rank` and `log_dir`.
          size: The number of ranks.

        Raises:
          StartupError: If `log_dir` cannot be written.
        """
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
            stream = self._streams.get((rank, fd))
            if stream is None:
                stream = self._streams[rank, fd] = _Stream()
            self._write(rank, fd, stream.feed(data))

    def finish(self, rank: int):
        """Writes what a rank left without a newline at its end."""
        for fd in (OUTPUT, ERRORS):
            if (rank, fd) in self._streams:
                self._write(rank, fd, self._streams.pop((rank, fd)).finish())

    def hear_only(self, rank: int | None):
        """Shows from now on, after a failure, only the last words of the rank that failed.

        Args:
          rank: That rank, or None if no rank has failed: then nothing changes.
        """
        if rank is not None:
            for other in sorted({other for other, _ in self._streams} - {rank}):
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
        self._screen.write(ERRORS, data, self._live_line())

    def close(self):
        """Writes what is left of all ranks, and closes the log files."""
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: the job has ended for that
            for rank in sorted({rank for rank, _ in self._streams}):
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
        self._screen.write(fd, lines, self._live_line())

    def _prefix(self, fd, rank):
        text = b"[%d]" % rank if self._has_prefix else b""
        return self._screen.coloured(fd, rank, text) + b" " * bool(text)

    def _live_line(self):
        """What the rank at the bottom of the terminal has written since its last newline."""
        if not self._screen.has_live_line or not self._is_shown(self._live_rank):
            return b""
        for fd in (ERRORS, OUTPUT):
            stream = self._streams.get((self._live_rank, fd))
            if stream and (unfinished := stream.unfinished(LONGEST_ROW)):
                return self._prefix(ERRORS, self._live_rank) + unfinished
        return b""


class _Stream:
    """Turns the bytes of one output of a rank into whole lines."""

    def __init__(self):
        self._line = bytearray()  # what came since the last newline
        self._chatter = ChatterFilter()

    def unfinished(self, most: int | None = None) -> bytes:
        """What a terminal would show of the line that is still being written: `most` bytes."""
        line = _latest(bytes(self._line[:most])).rstrip(b"\r")
        return line if line.strip() else b""

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes, and returns the lines that they complete."""
        lines = b""
        end = data.rfind(b"\n") + 1
        if end:
            text = self._chatter.remove(bytes(self._line) + data[:end])
            start = text.rfind(b"\n") + 1  # chatter may have cut a line in two
            lines, self._line = _latest_of_each(text[:start]), bytearray(text[start:])
        self._line += data[end:]
        if b"\r" in data:  # what has been drawn over is of no more interest
            del self._line[: max(0, self._line.rstrip(b"\r").rfind(b"\r"))]
        if len(self._line) > _LONGEST_LINE:
            lines += bytes(self._line) + b"\n"
            self._line.clear()
        return lines

    def finish(self) -> bytes:
        """Returns the line that has no newline, with one."""
        line = self.unfinished()
        return line + b"\n" if line else b""


def _latest_of_each(lines):
    if b"\r" not in lines:
        return lines
    return b"".join(_latest(line) + b"\n" for line in lines.split(b"\n")[:-1])


def _latest(line):
    """What a terminal shows of a line with carriage returns in it; one at its end is kept."""
    body = line.rstrip(b"\r")
    start = body.rfind(b"\r") + 1
    if start and (erasing := _ERASING.match(body, start)):
        start = erasing.end()
    return line[start : len(body) + 1]
