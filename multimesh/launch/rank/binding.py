"""Divides a host's cores among its ranks.

XLA makes as many threads as the process may use cores, so ranks that share all of them compete.
MPI's own binding gives one core to each rank when there are few of them, which wastes the others.
"""

import os
from collections.abc import Sequence

__all__ = ["bind_to_cores", "cores_of_rank"]


def cores_of_rank(cores: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """The cores that one rank uses.

    Every rank of a host gets equally many: a disjoint share while there are enough cores, and
    otherwise one core, in turn. So 2 and 4 ranks on 2 cores compute with the same threads each.

    Args:
      cores: The cores that this job may use.
      local_rank: The rank among those of its host.
      local_size: Number of ranks on this host.

    Returns:
      The numbers of its cores, never empty.
    """
    share = len(cores) // local_size
    if share == 0:
        return [cores[local_rank % len(cores)]]
    return list(cores[local_rank * share : (local_rank + 1) * share])


def bind_to_cores(local_rank: int, local_size: int):
    """Restricts this process, and what it starts, to its share of the cores it may use now."""
    # macOS has no affinity; the ranks then share all cores.
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores_of_rank(cores, local_rank, local_size))
