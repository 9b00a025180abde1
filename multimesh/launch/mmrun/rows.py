"""Turns the bytes of one output of a rank into whole lines, and what is still being drawn.

Most programs end a line and are done with it. A progress bar redraws its line with carriage
returns; of such a line only the latest state counts. Bars below each other (of epochs and of
batches, say) move the cursor up again as well: then their last rows are kept until it can no
longer come back to them.
"""

import re

from multimesh.launch.mmrun.chatter import ChatterFilter

__all__ = ["Rows"]

# A program that never writes a newline must not fill mmrun's memory, nor one that moves about.
_LONGEST_LINE = 1 << 24
_MOST_ROWS = 100
# A bar may erase its old state before it draws the new one, and so would erase its prefix.
_ERASING = re.compile(rb"(?:\x1b\[[012]?K)+")
_CURSOR_UP = re.compile(rb"\x1b\[(\d*)A")
_MOVES = re.compile(rb"(\n|\x1b\[\d*A)")


class Rows:
    """One output of a rank."""

    def __init__(self):
        self._rows = [bytearray()]  # what may still change
        self._at = 0  # the row with the cursor
        self._height = 1  # how many rows the cursor is known to move in
        self._chatter = ChatterFilter()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes, and returns the lines that are now final."""
        if self._height == 1 and not _CURSOR_UP.search(data):
            return self._feed_line(data)
        lines = b""
        for part in _MOVES.split(data):
            if part == b"\n":
                lines += self._move_down()
            elif move := _CURSOR_UP.fullmatch(part):
                steps = int(move[1] or 1)
                self._height = min(max(self._height, steps + 1), _MOST_ROWS)
                self._at = max(0, self._at - steps)
            else:
                lines += self._write(part)
        return lines

    def unfinished(self, most: int | None = None) -> list[bytes]:
        """What a terminal would show of the rows that are not final: `most` bytes of each."""
        rows = (_latest(bytes(row[:most])).rstrip(b"\r") for row in self._rows)
        return [row for row in rows if row.strip()]

    def finish(self) -> bytes:
        """Returns the rows that are not final, as lines."""
        return b"".join(row + b"\n" for row in self.unfinished())

    def _feed_line(self, data):
        """The common case: there is only one row."""
        lines = b""
        end = data.rfind(b"\n") + 1
        if end:
            text = self._chatter.remove(bytes(self._rows[0]) + data[:end])
            start = text.rfind(b"\n") + 1  # chatter may have cut a line in two
            lines, self._rows[0] = _latest_of_each(text[:start]), bytearray(text[start:])
        return lines + self._write(data[end:])

    def _write(self, text):
        row = self._rows[self._at]
        row += text
        if b"\r" in text:  # what has been drawn over is of no more interest
            del row[: max(0, row.rstrip(b"\r").rfind(b"\r"))]
        if len(row) <= _LONGEST_LINE:
            return b""
        line = bytes(row) + b"\n"
        row.clear()
        return line

    def _move_down(self):
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(bytearray())
        if self._at < self._height:
            row = self._rows[self._at]
            if row and not row.endswith(b"\r"):
                row += b"\r"  # the cursor is at its begin
            return b""
        self._at -= 1
        final = bytes(self._rows.pop(0))
        is_removed_bar = b"\r" in final and not final.strip()
        return b"" if is_removed_bar else _latest(final) + b"\n"


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
