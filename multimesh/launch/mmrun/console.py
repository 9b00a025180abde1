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

# Gloo prints this line for every group of devices, and nothing can turn it off. It may come in
# the middle of a line of the program's, whose parts then belong together.
_CHATTER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\n"
)
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
    _shown: bytes = b""  # the unfinished line that is on the terminal now

    @classmethod
    def on_standard_output(cls) -> "Console":
        """A console that shows unfinished lines if standard error is a terminal."""
        return cls(ERRORS if os.isatty(ERRORS) else None)

    def feed(self, rank: int, fd: int, data: bytes):
        """Takes the next bytes that a rank wrote to `OUTPUT` or `ERRORS`."""
        if self.only_rank not in (None, rank):
            return
        text = _CHATTER.sub(b"", self._pending.get((rank, fd), b"") + data)
        *lines, rest = text.split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        # Of a line that redraws itself only the latest state is still of interest.
        self._pending[rank, fd] = _latest(rest)
        for line in lines:
            self._write_line(rank, fd, line)
        self._refresh()

    def finish(self, rank: int):
        """Writes what a rank left without a newline at its end."""
        for fd in (OUTPUT, ERRORS):
            rest = self._pending.pop((rank, fd), b"")
            if rest:
                self._write_line(rank, fd, rest)
        self._refresh()

    def show(self, rank: int, text: bytes):
        """Writes a text of several lines as a rank's errors."""
        for line in text.rstrip(b"\n").split(b"\n"):
            self._write_line(rank, ERRORS, line)

    def say(self, text: str):
        """Writes a line of mmrun's own."""
        self.pass_on(text.encode(errors="backslashreplace") + b"\n")

    def pass_on(self, data: bytes):
        """Writes bytes of mpiexec's or mmrun's own, as they are."""
        self._write(ERRORS, data)
        self._refresh()

    def _write_line(self, rank, fd, line):
        self._write(fd, b"[%d] %s\n" % (rank, _latest(line)))

    def _write(self, fd, data):
        self._draw(b"")
        _write_all(fd, data)

    def _refresh(self):
        """Shows what rank 0 has written since its last newline."""
        unfinished = self._pending.get((0, ERRORS)) or self._pending.get((0, OUTPUT))
        self._draw(b"[0] " + unfinished if unfinished else b"")

    def _draw(self, text):
        if self.terminal is not None and text != self._shown:
            _write_all(self.terminal, (_ERASE_LINE if self._shown else b"") + text)
            self._shown = text


def _latest(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]
