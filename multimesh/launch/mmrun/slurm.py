"""What SLURM says of the job around mmrun: its nodes, its tasks, and how srun can start MPI."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from multimesh.errors import StartupError
from multimesh.launch.environment import repeated_numbers
from multimesh.launch.mmrun.hosts import Host

__all__ = ["Allocation", "can_bind_tasks", "read_allocation", "supported_pmis"]

_QUERY_SECONDS = 20


@dataclass(frozen=True)
class Allocation:
    """The resources of a SLURM job.

    Attributes:
      job: The job's number.
      nodes: Each node, with the tasks that the job asked for on it as places.
      tasks: Number of tasks that the job asked for.
      cpus: Number of CPUs on all nodes.
    """

    job: str
    nodes: tuple[Host, ...]
    tasks: int
    cpus: int


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Reads the job's resources from the environment of `sbatch` or `salloc`.

    Args:
      environ: The environment of mmrun.

    Returns:
      The allocation, or None outside a SLURM job.

    Raises:
      StartupError: SLURM's variables are incomplete.
    """
    job, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not nodelist:
        return None
    names = _expand(nodelist)
    per_node = repeated_numbers(environ.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))
    cpus = repeated_numbers(environ.get("SLURM_JOB_CPUS_PER_NODE", f"1(x{len(names)})"))
    if len(per_node) != len(names):
        raise StartupError(
            f"SLURM's variables do not agree: SLURM_JOB_NODELIST={nodelist} has {len(names)} "
            f"nodes, SLURM_TASKS_PER_NODE={environ.get('SLURM_TASKS_PER_NODE')} has "
            f"{len(per_node)}. Start mmrun in the job's own environment."
        )
    nodes = tuple(Host(name, tasks) for name, tasks in zip(names, per_node, strict=True))
    tasks = int(environ.get("SLURM_NTASKS") or sum(per_node))
    return Allocation(job, nodes, tasks, sum(cpus))


def supported_pmis(srun: str) -> frozenset[str]:
    """The PMI types for which this srun has a plug-in, from `srun --mpi=list`."""
    said = _ask([srun, "--mpi=list"])
    return frozenset(word for word in re.findall(r"[\w]+", said) if word in ("pmix", "pmi2"))


def can_bind_tasks() -> bool:
    """Whether this cluster binds the tasks of a step to CPUs."""
    found = re.search(
        r"^TaskPlugin\s*=\s*(\S+)", _ask(["scontrol", "show", "config"]), re.MULTILINE
    )
    return found is not None and found[1] != "task/none"


def _expand(nodelist):
    """The names in `n[1-3],m1`; only SLURM itself knows its syntax in full."""
    if not re.search(r"[\[,]", nodelist):
        return [nodelist]
    names = _ask(["scontrol", "show", "hostnames", nodelist]).split()
    if not names:
        raise StartupError(
            f"`scontrol show hostnames {nodelist}` gave nothing. mmrun needs SLURM's commands on "
            "PATH inside a job over several nodes."
        )
    return names


def _ask(command):
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr
