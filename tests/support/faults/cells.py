"""The matrix of faults, as data: what goes wrong, on which rank, when, and under which launcher.

A cell is one combination. There are too many to run them all each time, so `covering_set` chooses
the fewest that bring together every two values that can meet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = [
    "KINDS",
    "LAUNCHERS",
    "MOMENTS",
    "PLACES",
    "Cell",
    "Kind",
    "Launcher",
    "Place",
    "all_cells",
    "covering_set",
]

MOMENTS = {
    "before-init": "before `init`",
    "before-first-step": "before the first step",
    "in-step": "in a step",
    "between-steps": "between steps",
    "at-end": "at the end of the program",
}


@dataclass(frozen=True)
class Kind:
    """A way in which a rank goes wrong.

    Attributes:
      name: Its name here.
      text: Its name in the documentation.
      code: The exit code that the job must have, or None for any but 0.
      has_traceback: Whether the rank shows a traceback.
      is_silent: Whether no process ends, so that only a timeout can notice.
      leaves_with_0: Whether the process ends as if all were well.
      meaningless: The moments at which it cannot happen, each with the reason.
    """

    name: str
    text: str
    code: int | None = 1
    has_traceback: bool = False
    is_silent: bool = False
    leaves_with_0: bool = False
    meaningless: Mapping[str, str] = field(default_factory=dict)

    @property
    def moments(self) -> list[str]:
        """The moments at which it can happen."""
        return [moment for moment in MOMENTS if moment not in self.meaningless]


_NO_USER_CODE = "no code of the user's runs between the instructions of a step"
_SAME_HOOK = "a hook registered then runs at the same moment as one registered at the end"
KINDS = (
    Kind("raise", "an exception", has_traceback=True),
    Kind("exit-3", "`sys.exit(3)`", code=3),
    Kind(
        "exit-0",
        "`sys.exit(0)` too early",
        leaves_with_0=True,
        meaningless={"at-end": "a program that ends with code 0 at its end has not failed"},
    ),
    Kind("os-exit-0", "`os._exit(0)`", leaves_with_0=True),
    Kind("sigkill", "SIGKILL", code=128 + 9),
    Kind("sigsegv", "SIGSEGV", code=128 + 11),
    Kind("sigstop", "SIGSTOP", code=None, is_silent=True),
    Kind("receive", "a receive of the user's that hangs", code=None, is_silent=True),
    Kind("thread", "an exception, with a thread left over", has_traceback=True),
    Kind(
        "import",
        "an exception in an import",
        has_traceback=True,
        meaningless={"in-step": _NO_USER_CODE},
    ),
    Kind(
        "compile",
        "an exception in a loss that is compiled",
        has_traceback=True,
        meaningless={
            "before-init": "JAX must not start before `init`",
            "in-step": "everything is compiled before the first step",
        },
    ),
    Kind(
        "loader",
        "an exception in the data loader",
        has_traceback=True,
        meaningless={
            "before-init": "nothing loads batches yet",
            "in-step": _NO_USER_CODE,
            "at-end": "nothing loads batches any more",
        },
    ),
    Kind(
        "atexit",
        "an exception in an exit hook",
        has_traceback=True,
        meaningless={
            "before-first-step": _SAME_HOOK,
            "in-step": _NO_USER_CODE,
            "between-steps": _SAME_HOOK,
        },
    ),
)


@dataclass(frozen=True)
class Place:
    """The rank that the fault hits, of so many."""

    ranks: int
    rank: int


PLACES = tuple(Place(ranks, rank) for ranks in (2, 4) for rank in range(ranks))


@dataclass(frozen=True)
class Launcher:
    """What starts the ranks.

    Attributes:
      name: Its name here.
      text: Its name in the documentation.
      mpi: The MPI of the ranks.
      is_mmrun: Whether it is mmrun, which promises more.
      plugin: What `srun --mpi=` is to use; empty where it is not srun.
    """

    name: str
    text: str
    mpi: str
    is_mmrun: bool = False
    plugin: str = ""


LAUNCHERS = (
    Launcher("mmrun-openmpi", "mmrun, Open MPI", "openmpi", is_mmrun=True),
    Launcher("mmrun-mpich", "mmrun, MPICH", "mpich", is_mmrun=True),
    Launcher("mpirun", "Open MPI's `mpirun`", "openmpi"),
    Launcher("srun-pmix", "`srun --mpi=pmix`, Open MPI", "openmpi", plugin="pmix"),
    Launcher("srun-pmi2", "`srun --mpi=pmi2`, MPICH", "mpich", plugin="pmi2"),
)


@dataclass(frozen=True)
class Cell:
    """One job of the matrix."""

    kind: Kind
    moment: str
    place: Place
    launcher: Launcher

    def __str__(self):
        rank, ranks = self.place.rank, self.place.ranks
        return f"{self.kind.name}.{self.moment}.{rank}of{ranks}.{self.launcher.name}"


def all_cells() -> Iterator[Cell]:
    """The whole matrix."""
    for launcher in LAUNCHERS:
        for place in PLACES:
            for kind in KINDS:
                for moment in kind.moments:
                    yield Cell(kind, moment, place, launcher)


def covering_set() -> list[Cell]:
    """The fewest cells in which every two values meet that can meet.

    Each kind hits each place once, which no smaller set can do, and meanwhile goes through the
    launchers and its moments in turn. Each kind starts at another launcher and another moment, so
    that these two, and both with the places, meet in all combinations as well.
    """
    return [
        Cell(
            kind,
            kind.moments[(step + 2 * start) % len(kind.moments)],
            place,
            LAUNCHERS[(step + start) % len(LAUNCHERS)],
        )
        for start, kind in enumerate(KINDS)
        for step, place in enumerate(PLACES)
    ]
