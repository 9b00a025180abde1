"""Places host batches on the devices that read them, one array for each microbatch."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

from multimesh.batch.shares import Shares
from multimesh.batch.spec import BatchSpec
from multimesh.errors import RankMismatchError
from multimesh.plan import Plan
from multimesh.transport import Group

__all__ = ["COMPARED", "PlacedBatch", "Placer"]

# Loaders that are seeded differently may agree on the first batch, which made the example.
COMPARED = 3


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the devices that read it; made by `prepare_batch`, taken by `step_fn`.

    Attributes:
      arrays: By slice variable, submesh and microbatch.
      owner: The step that it was prepared for.
    """

    arrays: dict[tuple[core.Var, int, int], jax.Array]
    owner: Any

    def __repr__(self) -> str:
        return f"PlacedBatch({len(self.arrays)} arrays)"


@dataclass(frozen=True)
class _Read:
    """A slice of the batch that a submesh reads of one microbatch.

    Attributes:
      key: The value in the plan, the submesh and the microbatch.
      leaf: Which leaf of the batch.
      rows: The part of each share that the microbatch holds.
      shape: The global shape of the slice.
      sharding: How it lies on the submesh.
      indices: For each device of this rank the part of the slice that it gets.
    """

    key: tuple[core.Var, int, int]
    leaf: int
    rows: slice
    shape: tuple[int, ...]
    sharding: NamedSharding
    indices: Sequence[tuple[jax.Device, Any]]


class Placer:
    """Places batches for one step."""

    def __init__(self, plan: Plan, first: int, spec: BatchSpec, shares: Shares, group: Group):
        """Finds out which rows each local device needs.

        Args:
          plan: The plan.
          first: The position of the first batch leaf among the step's arguments.
          spec: The structure of what each rank gives.
          shares: How the rows are divided over ranks.
          group: The control plane.
        """
        self.plan = plan
        self.spec = spec
        self.shares = shares
        self.group = group
        self.share = shares.of_rank[group.rank]
        self.to_compare = COMPARED
        step = plan.cut.step
        leaf_of = {entry.inner: step.arguments.index(entry.whole) - first for entry in step.slices}
        # Decided from the plan, so that every rank exchanges shares or none does.
        self.exchanges = False
        self.reads: list[_Read] = []
        numbers: list[_Read] = []
        for var, submesh in self._all_reads(leaf_of):
            for microbatch in range(step.microbatches):
                read = self._read(var, submesh, microbatch, leaf_of[var])
                if read.leaf < len(spec.shapes):
                    self.reads.append(read)
                else:
                    numbers.append(read)
        self.reads = [read for read in self.reads if read.indices]
        self.numbers = self._place_numbers([read for read in numbers if read.indices])

    def _all_reads(self, leaf_of) -> list[tuple[core.Var, int]]:
        return list(
            dict.fromkeys(
                (var, task.submesh)
                for task in self.plan.tasks
                for var in task.inputs
                if var in leaf_of
            )
        )

    def _read(self, var: core.Var, submesh: int, microbatch: int, leaf: int) -> _Read:
        sizes = self.plan.sizes
        variant = self.plan.variants[self.plan.variant_of(microbatch)]
        twin = variant.twins.get(var, var)
        sharding, shape = variant.cut.shardings.of(twin, submesh), twin.aval.shape
        if self.shares.count > 1 and leaf < len(self.spec.shapes):
            for device, index in sharding.devices_indices_map(shape).items():
                share = self.shares.of_rank[device.process_index]
                start, stop, _ = index[0].indices(shape[0])
                mine = sizes[microbatch] * share, sizes[microbatch] * (share + 1)
                self.exchanges |= start < mine[0] or stop > mine[1]
        start = sum(sizes[:microbatch])
        rows = slice(start, start + sizes[microbatch])
        indices = list(sharding.addressable_devices_indices_map(shape).items())
        return _Read((var, submesh, microbatch), leaf, rows, shape, sharding, indices)

    def _place_numbers(self, reads: list[_Read]) -> dict:
        """The numbers of the microbatches, which are the same for every batch."""
        placed = {}
        for read in reads:
            number = np.asarray(read.key[2], np.int32)
            parts = [jax.device_put(number, device) for device, _ in read.indices]
            placed[read.key] = jax.make_array_from_single_device_arrays((), read.sharding, parts)
        return placed

    def place(self, batch: Any) -> PlacedBatch:
        """Copies a host batch to the devices of this rank.

        Args:
          batch: A pytree of arrays with the shapes of the example batch.

        Raises:
          BatchError: The batch differs from the example in tree, shape or dtype.
          RankMismatchError: At one of the first batches: ranks that must give the same rows did
            not.
        """
        leaves = self.spec.flatten(batch)
        if self.to_compare:
            self._compare(leaves)
            self.to_compare -= 1
        shares = self._gather(leaves)
        pieces, devices = [], []
        for read in self.reads:
            # A slice of each share, in order.
            slices = [share[read.leaf][read.rows] for share in shares]
            rows = slices[0] if len(slices) == 1 else np.concatenate(slices)
            for device, index in read.indices:
                pieces.append(np.array(rows[index]))
                devices.append(device)
        # The pieces are copies: the caller may reuse its memory at once, and a CPU device, which
        # uses aligned host memory in place whatever device_put is told, may keep them.
        placed = iter(jax.device_put(pieces, devices))
        arrays = {
            read.key: jax.make_array_from_single_device_arrays(
                read.shape, read.sharding, [next(placed) for _ in read.indices]
            )
            for read in self.reads
        }
        return PlacedBatch(arrays | self.numbers, self)

    def _gather(self, leaves: list[np.ndarray]) -> list[list[np.ndarray]]:
        if self.shares.count == 1:
            return [leaves]
        if not self.exchanges:  # only rows of the own share are read: the others may be anything
            return [leaves] * self.shares.count
        return self.shares.gather(self.group, leaves)

    def _compare(self, leaves: list[np.ndarray]) -> None:
        if self.group.size == 1:
            return
        sums = [zlib.crc32(leaf.tobytes()) for leaf in leaves]
        everyone = self.group.allgather(sums, "comparing batches")
        for rank, (other, share) in enumerate(zip(everyone, self.shares.of_rank, strict=True)):
            first = self.shares.of_rank.index(share)
            for name, mine, theirs in zip(self.spec.names, everyone[first], other, strict=True):
                if mine != theirs:
                    raise RankMismatchError(
                        f"Ranks {first} and {rank} must give the same rows (share {share} of "
                        f"{self.shares.count}), but {name} differs. With global_batch every rank "
                        "gives the whole batch; with local_batch, the share that "
                        "prepare_batch.share says. Seed the data loader alike on all ranks."
                    )
