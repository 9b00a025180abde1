"""Which launcher started this process, read from the environment.

Asking MPI instead would start it, which a notebook or a plain `python` run must never do.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launcher", "detect_launcher", "repeated_numbers"]


@dataclass(frozen=True)
class Launcher:
    """What a launcher told this process.

    Attributes:
      name: The launcher, for messages.
      rank: This process among all.
      size: Number of processes, or None where the launcher does not say.
      local_rank: This process among those of its host, or None.
      local_size: Number of processes on this host, or None.
    """

    name: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None


# Name, and the variables of rank, size, local rank and local size, most specific first: mpiexec
# inside a SLURM job inherits SLURM's variables, and SLURM with PMIx sets both kinds.
_LAUNCHERS = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None, None),
    ("PMIx", "PMIX_RANK", None, None, None),
)
# Outside a step, and SLURM's numbers for the shell of `salloc` and for a batch script.
_NO_STEPS = ("", "4294967290", "4294967291")


def detect_launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Reads from the environment whether a launcher started this process.

    Args:
      environ: A mapping to read in place of `os.environ`.

    Returns:
      The launcher, or None for a process that was started by hand, and for a worker of Python's
      `multiprocessing`: it inherits the rank's environment, but is no rank.
    """
    environ = os.environ if environ is None else environ
    if _is_worker():
        return None
    for name, rank, *rest in _LAUNCHERS:
        # A batch script and an interactive shell have SLURM_PROCID=0 too, but srun started neither.
        if name == "srun" and environ.get("SLURM_STEP_ID", "") in _NO_STEPS:
            continue
        if environ.get(rank, "").isdecimal():
            numbers = (environ.get(key, "") if key else "" for key in rest)
            size, local_rank, local_size = (int(n) if n.isdecimal() else None for n in numbers)
            if local_size is None:
                local_rank, local_size = _place_in_step(environ)
            return Launcher(name, int(environ[rank]), size, local_rank, local_size)
    return None


def _is_worker() -> bool:
    """Whether Python's `multiprocessing` has started this process."""
    # Only looked up: a process that has not imported it is nobody's worker.
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return False
    # While a worker imports the script, it does not know its parent yet.
    starts = (word.startswith("from multiprocessing.") for word in sys.orig_argv)
    return multiprocessing.parent_process() is not None or any(starts)


def _place_in_step(environ):
    """The local rank and size of a task of srun, which only has the sizes of all nodes."""
    sizes = repeated_numbers(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node, local_rank = (environ.get(name, "") for name in ("SLURM_NODEID", "SLURM_LOCALID"))
    if environ.get("SLURM_STEP_ID", "") in _NO_STEPS or not local_rank.isdecimal():
        return None, None
    if not node.isdecimal() or int(node) >= len(sizes):
        return int(local_rank), None
    return int(local_rank), sizes[int(node)]


def repeated_numbers(text: str) -> list[int]:
    """The numbers in SLURM's `2(x3),1`: 2, 2, 2 and 1."""
    numbers = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(number)] * int(times or 1)
    return numbers
