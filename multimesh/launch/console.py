"""Writes the output of all ranks to mmrun's own: whole lines, each with its rank in front.

There is one writer, so lines of different ranks never mix. A line counts as whole at its newline;
a progress bar, which redraws itself with carriage returns, is kept to its latest state. On a
terminal, what rank 0 has written since its last newline (its bar, a prompt) is shown at the
bottom, and is drawn again after any other line that comes in between.
"""

import os
import re
from dataclasses import dataclass, field

__all__ = ["Console"]

# Gloo prints this line for every group of devices, and nothing can turn it off.
_CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
_ERASE_LINE = b"\r\x1b[K"
# A program that never writes a newline must not fill mmrun's memory.
_LONGEST_LINE = 1 << 20

OUTPUT, ERRORS = 1, 2


@dataclass
class Console:
    """The one writer to mmrun's output.

    Attributes:
      terminal: The descriptor to show rank 0's unfinished line on, or None.
      only_rank: The one rank whose output is still shown, or None for all.
    """

    terminal: int | None = None
    only_rank: int | None = None
    _pending: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _open_line: bytes = b""

    @classmethod
    def on_standard_output(cls) -> "Console":
        """A console that shows unfinished lines if standard error is a terminal."""
        return cls(ERRORS if os.isatty(ERRORS) else None)

    def feed(self, rank: int, fd: int, data: bytes):
        """Takes the next bytes that a rank wrote to `OUTPUT` or `ERRORS`."""
        if self.only_rank not in (None, rank):
            return
        text = self._pending.get((rank, fd), b"") + data
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._write_line(rank, fd, line)
        if len(rest) > _LONGEST_LINE:
            self._write_line(rank, fd, rest)
            rest = b""
        # Of a line that redraws itself only the latest state is still of interest.
        self._pending[rank, fd] = rest = _latest(rest)
        if rank == 0 and self.terminal is not None:
            self._draw_open_line(b"[0] " + rest if rest else b"")

    def finish(self, rank: int):
        """Writes what a rank left without a newline at its end."""
        for fd in (OUTPUT, ERRORS):
            rest = self._pending.pop((rank, fd), b"")
            if rest:
                if rank == 0:
                    self._draw_open_line(b"")
                self._write_line(rank, fd, rest)

    def show(self, rank: int, text: bytes):
        """Writes a text of several lines as a rank's errors."""
        for line in text.rstrip(b"\n").split(b"\n"):
            self._write_line(rank, ERRORS, line)

    def say(self, text: str):
        """Writes a line of mmrun's own."""
        self._write(ERRORS, text.encode(errors="backslashreplace") + b"\n")

    def pass_on(self, data: bytes):
        """Writes bytes of mpiexec's own, as they are."""
        self._write(ERRORS, data)

    def _write_line(self, rank, fd, line):
        if not _CHATTER.search(line):
            self._write(fd, b"[%d] %s\n" % (rank, _latest(line)))

    def _write(self, fd, data):
        if self._open_line:
            _write_all(self.terminal, _ERASE_LINE)
        _write_all(fd, data)
        if self._open_line:
            _write_all(self.terminal, self._open_line)

    def _draw_open_line(self, text):
        if text != self._open_line:
            _write_all(self.terminal, _ERASE_LINE + text)
            self._open_line = text


def _latest(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]
