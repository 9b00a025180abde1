"""What cannot hold, and why: the launchers that are not ours do what they do."""

from dataclasses import dataclass

from support.faults.cells import KINDS, MOMENTS, Cell

__all__ = ["LIMITS", "Limit", "excused_promises"]

ALL_KINDS = frozenset(kind.name for kind in KINDS)
ALL_MOMENTS = frozenset(MOMENTS)


@dataclass(frozen=True)
class Limit:
    """A promise that some cells need not keep.

    Attributes:
      launchers: The names of the launchers that it is about.
      promises: The names of the promises.
      reason: Why they cannot be kept, for the documentation.
      kinds: The names of the kinds of fault.
      moments: The names of the moments.
    """

    launchers: frozenset[str]
    promises: frozenset[str]
    reason: str
    kinds: frozenset[str] = ALL_KINDS
    moments: frozenset[str] = ALL_MOMENTS

    def covers(self, cell: Cell) -> bool:
        """Whether it is about a cell."""
        return (
            cell.launcher.name in self.launchers
            and cell.kind.name in self.kinds
            and cell.moment in self.moments
        )


LIMITS: tuple[Limit, ...] = ()


def excused_promises(cell: Cell) -> set[str]:
    """The names of the promises that a cell need not keep."""
    return {name for limit in LIMITS if limit.covers(cell) for name in limit.promises}
