"""Divides a host's cores among its ranks.

XLA makes as many threads as the process may use cores, so ranks that share all of them compete.
MPI's own binding gives one core to each rank when there are few of them, which wastes the others.
"""

import itertools
import os
from collections.abc import Sequence

from multimesh.launch.topology import Core, read_cores

__all__ = ["bind_to_cores", "cores_of_rank"]


def cores_of_rank(cores: Sequence[Core], local_rank: int, local_size: int) -> list[int]:
    """The cores that one rank uses.

    Every rank of a host gets equally many: a disjoint share while there are enough cores, and
    otherwise one core, in turn. So 2 and 4 ranks on 2 cores compute with the same threads each.
    A share lies in one NUMA node where that leaves a share for every rank, and threads of one
    physical core stay together.

    Args:
      cores: The cores that this job may use, neighbours close together.
      local_rank: The rank among those of its host.
      local_size: Number of ranks on this host.

    Returns:
      The numbers of its cores, never empty.
    """
    share = max(1, len(cores) // local_size)
    shares = [
        numbers
        for _, node in itertools.groupby(cores, lambda core: core.node)
        for numbers in _cut([core.number for core in node], share)
    ]
    if len(shares) < local_size:  # a node's last cores are too few for a share of their own
        shares = _cut([core.number for core in cores], share)
    if len(shares) < local_size:
        return shares[local_rank % len(shares)]
    # What is left over is left everywhere, not only at the end.
    return shares[local_rank * len(shares) // local_size]


def _cut(numbers, size):
    """Cuts off shares of one size; what is left is too few for another one."""
    return [numbers[start : start + size] for start in range(0, len(numbers) - size + 1, size)]


def bind_to_cores(local_rank: int, local_size: int):
    """Restricts this process, and what it starts, to its share of the cores it may use now."""
    # macOS has no affinity; the ranks then share all cores.
    if hasattr(os, "sched_setaffinity"):
        cores = read_cores(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores_of_rank(cores, local_rank, local_size))
