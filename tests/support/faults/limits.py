"""What cannot hold, and why: a launcher that is not mmrun does as it pleases."""

from dataclasses import dataclass

from support.faults.cells import KINDS, MOMENTS, Cell

__all__ = ["LIMITS", "PROMPT", "Limit", "excused_promises"]

PROMPT = "prompt"
ALL_KINDS = frozenset(kind.name for kind in KINDS)
ALL_MOMENTS = frozenset(MOMENTS)


@dataclass(frozen=True)
class Limit:
    """A promise that some cells need not keep.

    Attributes:
      launchers: The names of the launchers that it is about.
      promises: The names of the promises; not to be `PROMPT` lets a timeout pass before the end.
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


SRUN = frozenset({"srun-pmix", "srun-pmi2"})
NOT_MMRUN = SRUN | {"mpirun"}

LIMITS = (
    Limit(
        launchers=NOT_MMRUN,
        promises=frozenset({PROMPT}),
        kinds=frozenset({"exit-0", "os-exit-0"}),
        reason="Only mmrun sees that a rank leaves with code 0. Here the job may go on until a "
        "wait for that rank passes the stall timeout, or before `init` the start timeout.",
    ),
    Limit(
        launchers=NOT_MMRUN,
        promises=frozenset({"traceback"}),
        kinds=frozenset({"sigstop", "receive", "exit-0", "os-exit-0"}),
        reason="Ranks that wait for the same one may all report it: only mmrun shows one of them.",
    ),
    Limit(
        launchers=NOT_MMRUN,
        promises=frozenset({PROMPT}),
        kinds=frozenset({"thread"}),
        moments=frozenset({"before-init"}),
        reason="Before `init` nothing of multimesh ends a rank that Python keeps alive for a "
        "thread: the start timeout of the others ends the job.",
    ),
    Limit(
        launchers=SRUN,
        promises=frozenset({"code"}),
        kinds=frozenset(kind.name for kind in KINDS if kind.code is not None),
        reason="`srun` returns the highest code of all ranks, and one that it ends itself counts "
        "as 137 or 143.",
    ),
)


def excused_promises(cell: Cell) -> set[str]:
    """The names of the promises that a cell need not keep."""
    return {name for limit in LIMITS if limit.covers(cell) for name in limit.promises}
