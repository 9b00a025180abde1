"""How the rows of a batch are divided over processes."""

from dataclasses import dataclass

import numpy as np

from multimesh.errors import UsageError
from multimesh.stages.cut import CutStep
from multimesh.stages.shardings import Submesh, resolve_spec
from multimesh.transport import Group

__all__ = ["Shares", "find_shares"]


@dataclass(frozen=True)
class Shares:
    """How the batch is divided over processes.

    Attributes:
      count: The number of shares.
      of_rank: The share that each rank gives.
    """

    count: int
    of_rank: tuple[int, ...]

    def gather(self, group: Group, leaves: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the leaves of every share, in order. Collective."""
        everyone = group.allgather(leaves, "placing a batch")
        return [everyone[self.of_rank.index(share)] for share in range(self.count)]


def find_shares(cut: CutStep, ranks: int, batch_axis: str) -> Shares:
    """Finds the shares: the processes that the batch axis of the first reading stage spans.

    Args:
      cut: The cut step.
      ranks: The number of processes.
      batch_axis: The logical name of the rows.

    Raises:
      UsageError: The batch axis is spread over processes irregularly.
    """
    sliced = {entry.inner for entry in cut.step.slices}
    readers = [task.submesh for task in cut.tasks if sliced & set(task.inputs)]
    place = cut.submeshes[min(readers, default=0)]
    groups = _process_groups(place, batch_axis)
    of_rank = [next((i for i, g in enumerate(groups) if rank in g), -1) for rank in range(ranks)]
    for other in cut.submeshes:
        processes = other.processes
        for position, rank in enumerate(processes):
            if of_rank[rank] < 0:
                of_rank[rank] = position * len(groups) // len(processes)
    return Shares(len(groups), tuple(max(share, 0) for share in of_rank))


def _process_groups(place: Submesh, batch_axis: str) -> list[set[int]]:
    """The processes of each share of a submesh, in order of rows."""
    ((axes),) = resolve_spec((batch_axis,), place.axes)
    names = list(place.mesh.axis_names)
    devices = np.moveaxis(
        place.mesh.devices, [names.index(axis) for axis in axes], range(len(axes))
    )
    parts = devices.reshape(int(np.prod(devices.shape[: len(axes)], initial=1)), -1)
    owners = [{device.process_index for device in part} for part in parts]
    groups = [owner for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    regular = len({owners.count(group) for group in groups}) == 1
    disjoint = sum(map(len, groups)) == len(set().union(*groups))
    if not (regular and disjoint):
        raise UsageError(
            f"The batch axis of the submesh {place.task_mesh.devices} is spread over processes "
            f"unevenly: the devices along it belong to processes {owners}. Order the devices of "
            "the TaskMesh by process, with equally many for each."
        )
    return groups
