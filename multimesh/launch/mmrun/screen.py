"""mmrun's own standard output and error, with live rows at the bottom of a terminal.

The live rows are what a rank has not finished: its progress bars, or a prompt. They are drawn
again below any other line that comes in between.
"""

import errno
import os
import re
import select
import unicodedata
from collections.abc import Mapping, Sequence

__all__ = ["ERRORS", "LONGEST_ROW", "OUTPUT", "Screen", "fit", "rank_environment"]

OUTPUT, ERRORS = 1, 2
# More bytes than any terminal shows in one row.
LONGEST_ROW = 1 << 14

_ERASE_ROW, _ROW_ABOVE = b"\r\x1b[K", b"\x1b[A"
_RESET = b"\x1b[0m"
# Cyan, yellow, green, magenta, blue, and their bright forms; red is left to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# An escape sequence, or one character. Of the sequences only colours can be in a live row:
# the others move the cursor, or erase.
_CELL = re.compile(r"(?P<colour>\x1b\[[\d;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|.", re.DOTALL)


class Screen:
    """The one writer to mmrun's outputs."""

    def __init__(
        self,
        output: int = 1,
        errors: int = 2,
        terminals: frozenset[int] = frozenset(),
        *,
        has_colours: bool = False,
    ):
        """Takes the outputs as they are.

        Args:
          output: The descriptor for `OUTPUT`.
          errors: The descriptor for `ERRORS`, where the live rows are shown.
          terminals: Those of `OUTPUT` and `ERRORS` that are terminals.
          has_colours: Whether terminals show colours.
        """
        self._descriptors = {OUTPUT: output, ERRORS: errors}
        self._terminals = terminals
        self._has_colours = has_colours
        self._live: list[bytes] = []

    @classmethod
    def on_standard_output(cls, environ: Mapping[str, str]) -> "Screen":
        """The process's own outputs. A dumb terminal cannot erase a line, so it is none here."""
        if environ.get("TERM") == "dumb":
            return cls()
        terminals = frozenset(filter(os.isatty, (OUTPUT, ERRORS)))
        return cls(terminals=terminals, has_colours=not environ.get("NO_COLOR"))

    @property
    def has_live_rows(self) -> bool:
        """Whether live rows are shown."""
        return ERRORS in self._terminals

    @property
    def size(self) -> os.terminal_size | None:
        """Columns and lines of the terminal, or None without one that knows."""
        if not self.has_live_rows:
            return None
        try:
            size = os.get_terminal_size(self._descriptors[ERRORS])
        except OSError:
            return None
        return size if size.columns and size.lines else None

    def coloured(self, stream: int, rank: int, prefix: bytes) -> bytes:
        """A prefix in the colour of its rank, where the stream is a terminal with colours."""
        if not prefix or not self._has_colours or stream not in self._terminals:
            return prefix
        return b"\x1b[0;%dm%s%s" % (_COLOURS[rank % len(_COLOURS)], prefix, _RESET)

    def write(self, stream: int, lines: bytes, live: Sequence[bytes] = ()):
        """Writes whole lines, and leaves live rows below them.

        Args:
          stream: `OUTPUT` or `ERRORS`.
          lines: What to write; may be empty, to change the live rows only.
          live: The live rows, each with its prefix.

        Raises:
          BrokenPipeError: If nobody reads the output any more.
        """
        if not self.has_live_rows:
            _write_all(self._descriptors[stream], lines)
            return
        size = self.size
        rows = [fit(row, size.columns) if size else row for row in live]
        if lines and stream not in self._terminals:
            _write_all(self._descriptors[stream], lines)
            lines = b""
        if lines or rows != self._live:
            erase = _ROW_ABOVE.join([_ERASE_ROW] * len(self._live))
            _write_all(self._descriptors[ERRORS], erase + lines + b"\n".join(rows))
            self._live = rows


def rank_environment(
    size: os.terminal_size | None, prefix_width: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which a rank's progress bar knows how wide it may be.

    Args:
      size: The terminal's, or None where there is none.
      prefix_width: How many columns are taken by what is in front of a rank's lines.
      environ: The environment that ranks would have; what it sets already stays.

    Returns:
      The variables to add.
    """
    if size is None:
        return {}
    columns = max(1, size.columns - prefix_width)
    variables = {"COLUMNS": str(columns), "LINES": str(size.lines)}
    return {name: value for name, value in variables.items() if name not in environ}


def fit(line: bytes, columns: int) -> bytes:
    """The part of a line that fits into one row of a terminal, as it would look there."""
    row, width = "", 0
    for cell in _CELL.finditer(line[:LONGEST_ROW].decode(errors="replace")):
        text = " " if cell[0] == "\t" else cell[0]
        if cell["colour"]:
            row += text
        elif text.isprintable():
            width += _width(text)
            if width > columns:
                break
            row += text
    return row.encode() + (_RESET if "\x1b" in row else b"")


def _width(character):
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _write_all(descriptor, data):
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the shared terminal or pipe so
            select.select([], [descriptor], [])
        except OSError as error:
            if error.errno == errno.EIO:  # the terminal has been closed
                raise BrokenPipeError(*error.args) from error
            raise
