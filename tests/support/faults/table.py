"""The table of docs/faults.md: what holds where, from the data that the tests check."""

from support.faults.cells import KINDS, LAUNCHERS, MOMENTS, PLACES, Cell, Kind, Launcher
from support.faults.limits import LIMITS

__all__ = ["text"]


def text() -> str:
    """The table in Markdown, with what is under it."""
    head = ["Fault", *(launcher.text for launcher in LAUNCHERS)]
    rows = [[kind.text, *(_entry(kind, each) for each in LAUNCHERS)] for kind in KINDS]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"{number}. {limit.reason}" for number, limit in enumerate(LIMITS, 1))
    return "\n\n".join(filter(None, [table, notes, _meaningless()]))


def _entry(kind: Kind, launcher: Launcher) -> str:
    """`all`, or the numbers of the limits."""
    cells = [Cell(kind, moment, PLACES[0], launcher) for moment in kind.moments]
    notes = [
        str(number)
        for number, limit in enumerate(LIMITS, 1)
        if any(limit.covers(cell) for cell in cells)
    ]
    return f"all but {', '.join(notes)}" if notes else "all"


def _meaningless() -> str:
    """The combinations that do not exist."""
    lines = [
        f"- {kind.text}, {MOMENTS[moment]}: {reason}."
        for kind in KINDS
        for moment, reason in kind.meaningless.items()
    ]
    return "Left out, for want of a meaning:\n\n" + "\n".join(lines)
