"""Takes Gloo's chatter out of a rank's output.

Gloo prints a sentence for every group of devices, and nothing can turn that off. It prints it
piece by piece and flushes at its end, so the sentences of several threads may be mixed, piece by
piece, within a line and over several; and they may come in the middle of a line of the program's,
whose parts then belong together.

What is taken out is a run of such pieces that ends with a line and has a sentence's last words in
it. All else is the program's, and stays.
"""

import re

__all__ = ["ChatterFilter"]

_FIRST = b"[Gloo] Rank "
_LAST = b"Expected number of connected peer ranks is : "
_MIDDLE = (b" is connected to ", b" peer ranks. ")
_PIECE = re.compile(b"|".join(map(re.escape, (_FIRST, *_MIDDLE, _LAST))) + rb"|\d+|\n")
# Where a run may begin. One that does not begin with the first words continues a sentence that
# the program's own text has split. A number that is not first in its line may belong to that text.
_BEGIN = re.compile(
    rb"%s|(?:^\d+)?(?:%s)|%s"
    % (re.escape(_FIRST), b"|".join(map(re.escape, _MIDDLE)), re.escape(_LAST)),
    re.MULTILINE,
)


class ChatterFilter:
    """Takes the chatter out of one stream, given in texts of whole lines."""

    def __init__(self):
        self._owed = 0  # sentences that have begun and whose newline is still to come
        self._resume = 0  # where the next text continues them: behind a line that they cut

    def remove(self, text: bytes) -> bytes:
        """Takes the chatter out of a text.

        Args:
          text: Bytes that end with a newline. If the last text without its chatter did not end
            with one, this text begins with its unfinished line.

        Returns:
          The text without the chatter.
        """
        if not self._owed and _LAST not in text:
            return text
        kept = []
        position = 0
        while position < len(text):
            begin = self._find(text, position)
            end, stop = self._follow(text, begin)
            kept.append(text[position:begin])
            if end == begin:  # the program's after all
                self._owed = 0
                kept.append(text[begin:stop])
                end = stop
            position = end
        result = b"".join(kept)
        self._resume = len(result) - result.rfind(b"\n") - 1
        return result

    def _find(self, text, position):
        """Where the next run may begin."""
        if self._owed:
            return max(position, self._resume)
        match = _BEGIN.search(text, position)
        return match.start() if match else len(text)

    def _follow(self, text, begin):
        """Where a run's last whole line ends (`begin` if there is none), and where the run ends."""
        is_chatter = self._owed > 0
        # A run that begins amid a sentence has that one to end.
        owed = self._owed or int(not text.startswith(_FIRST, begin))
        end = stop = begin
        while piece := _PIECE.match(text, stop):
            stop = piece.end()
            if piece[0] == _FIRST:
                owed += 1
            elif piece[0] == b"\n":
                if not is_chatter:
                    break
                owed -= 1
                end, self._owed = stop, owed
                if not owed:
                    break
            is_chatter = is_chatter or piece[0] == _LAST
        return end, stop
