"""Which GPUs each rank uses: by their index among those that the rank sees.

Ranks of one host usually see the same GPUs, and each takes its part of them. A launcher or a
wrapper script may also have shown each rank GPUs of its own; then these are its part.
"""

import itertools
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import StartupError
from multimesh.launch.places import Place, ranks_at

__all__ = ["VisibleGpus", "count_gpus", "divide_gpus", "find_gpus", "jax_can_use_gpus"]

_LIST = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that one rank sees.

    Attributes:
      names: Their names, as `CUDA_VISIBLE_DEVICES` has them.
      per_task: How many SLURM gave to this rank alone, or None if it shares them with others.
    """

    names: tuple[str, ...] = ()
    per_task: int | None = None


def find_gpus(environ: Mapping[str, str], count: int) -> VisibleGpus:
    """The GPUs that a process with this environment sees.

    Args:
      environ: The environment.
      count: Number of GPUs of the host, or 0 if that cannot be seen.
    """
    names = tuple(str(index) for index in range(count))
    if _LIST in environ:
        listed = [name.strip() for name in environ[_LIST].split(",")]
        # CUDA reads the list up to the first entry that is no GPU, such as "" or "-1".
        names = tuple(itertools.takewhile(lambda name: _may_exist(name, count), listed))
    per_task = _gpus_per_task(environ)
    # Ranks that mpirun started inside the job have the variable too, but see all GPUs.
    return VisibleGpus(names, per_task if per_task and len(names) <= per_task else None)


def _may_exist(name, count):
    if name.isdecimal():
        return int(name) < count or not count
    return name.startswith(("GPU-", "MIG-"))


def _gpus_per_task(environ):
    """What `srun --gpus-per-task` was given; newer releases of SLURM say it in another way."""
    found = re.search(r"(?:^|:)(\d+)$", environ.get("SLURM_GPUS_PER_TASK", "")) or re.search(
        r"gres[/:]gpu(?::[^:=,]+)?[:=](\d+)", environ.get("SLURM_TRES_PER_TASK", "")
    )
    return int(found[1]) if found else None


def divide_gpus(
    visible: Sequence[VisibleGpus], places: Sequence[Place], asked: int | None
) -> list[tuple[int, ...]]:
    """Divides the GPUs of each host among its ranks.

    Args:
      visible: What each rank sees.
      places: The place of each rank.
      asked: GPUs for each rank; None for what SLURM gave to each, or one.

    Returns:
      The GPUs of each rank, as indices among those that it sees. Some may be left over.

    Raises:
      StartupError: There are too few of them.
    """
    return [_gpus_of_rank(rank, visible, places, asked) for rank in range(len(visible))]


def _gpus_of_rank(rank, visible, places, asked):
    mine = visible[rank]
    each = asked or mine.per_task or 1
    # Ranks with the same list share its GPUs; a wrapper script may have shown each its own.
    sharers = [peer for peer in ranks_at(places[rank], places) if visible[peer] == mine]
    if mine.per_task:
        sharers = [rank]
    if each * len(sharers) > len(mine.names):
        ranks = f"rank {rank}" if len(sharers) == 1 else f"{len(sharers)} ranks, with {each} each"
        possible = len(mine.names) // each
        remedy = f"Start at most {possible} there" if possible else "Ask for fewer"
        raise StartupError(
            f"{places[rank].host} needs {each * len(sharers)} GPUs for {ranks}. Got "
            f"{len(mine.names)} visible ones ({_LIST}={','.join(mine.names)}). {remedy}, or use "
            "CPU devices: init(cpus=...) or JAX_PLATFORMS=cpu."
        )
    first = sharers.index(rank) * each
    return tuple(range(first, first + each))


def count_gpus(root: Path = Path("/")) -> int:
    """The number of NVIDIA GPUs of this host, or container, as the driver shows them.

    Args:
      root: A folder to read in place of the file system's root.
    """
    devices = list((root / "dev").glob("nvidia[0-9]*"))
    return len(devices) or len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def jax_can_use_gpus(platforms: str | None) -> bool:
    """Whether JAX would look for GPUs, decided without starting it.

    Args:
      platforms: The value of `jax_platforms`, such as "cpu" or "cuda,cpu"; empty for all.
    """
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    try:
        import jax_plugins
    except ImportError:
        return False
    return any(
        module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__)
    )
