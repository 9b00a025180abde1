"""Places host batches on the devices that read them, one array for each microbatch.

A batch is given whole on every rank (`global_batch`), or each process gives its share
(`local_batch`). Microbatch k is made of the k-th slice of every share. Nothing of a batch moves
between ranks during a step: each leaf is placed on every submesh that reads it.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

from multimesh.errors import BatchError, RankMismatchError, UsageError
from multimesh.plan import Plan
from multimesh.stages.cut import CutStep
from multimesh.stages.shardings import Submesh, resolve_spec
from multimesh.transport import Group
from multimesh.trees import difference

__all__ = ["BatchSpec", "Placer", "PlacedBatch", "Shares", "find_shares"]


# Loaders that are seeded differently may agree on the first batch, which made the example.
_COMPARED = 3


@dataclass(frozen=True)
class BatchSpec:
    """The structure of the batches that one rank gives.

    Attributes:
      tree: The pytree structure.
      names: A name of each leaf, for errors.
      shapes: The shape of each leaf, rows first.
      dtypes: The dtype of each leaf, as JAX canonicalises it.
      rows: How many rows there are.
    """

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    rows: int

    @classmethod
    def of(cls, batch: Any, argument: str) -> "BatchSpec":
        """Reads the structure of an example batch.

        Args:
          batch: A pytree of arrays; every leaf has the same number of rows.
          argument: The name of the argument, for errors.

        Raises:
          BatchError: There is no leaf, a leaf has no rows, or the leaves differ in rows.
        """
        paths, tree = jax.tree_util.tree_flatten_with_path(batch)
        names = tuple(argument + jax.tree_util.keystr(path) for path, _ in paths)
        if not paths:
            raise BatchError(f"{argument} must hold at least one array. Got {batch!r}.")
        leaves = [host_array(leaf, name) for name, (_, leaf) in zip(names, paths, strict=True)]
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.ndim == 0:
                raise BatchError(f"{name} has no rows: its shape is {leaf.shape}.")
        rows = {name: leaf.shape[0] for name, leaf in zip(names, leaves, strict=True)}
        if len(set(rows.values())) > 1:
            raise BatchError(
                "Every leaf of a batch must have the same number of rows (dimension 0). "
                f"Got {rows}."
            )
        return cls(
            tree,
            names,
            tuple(leaf.shape for leaf in leaves),
            tuple(jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves),
            leaves[0].shape[0],
        )

    def like(self, batch: Any) -> "BatchSpec":
        """Reads the structure of another batch, which may have other shapes than this one.

        Raises:
          BatchError: The tree, the number of dimensions or a dtype differs, or the leaves differ
            in rows; the message names the leaf.
        """
        leaves, tree = jax.tree.flatten(batch)
        if tree != self.tree:
            raise BatchError(
                "The batch must have the leaves of the example batch. "
                f"{difference(self.tree, batch)}"
            )
        shapes = []
        for leaf, name, shape, dtype in zip(
            leaves, self.names, self.shapes, self.dtypes, strict=True
        ):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                leaf = host_array(leaf, name)
            got = _dtype(leaf)
            if len(leaf.shape) != len(shape) or got != dtype:
                raise BatchError(
                    f"{name} must be {dtype} with {len(shape)} dimensions, as in the example "
                    f"batch. Got {got}{list(leaf.shape)}."
                )
            shapes.append(tuple(leaf.shape))
        rows = {shape[0] for shape in shapes}
        if len(rows) > 1 or 0 in rows:
            counts = dict(zip(self.names, (shape[0] for shape in shapes), strict=True))
            raise BatchError(
                "Every leaf of a batch must have the same number of rows (dimension 0), at least "
                f"one. Got {counts}."
            )
        return replace(self, shapes=tuple(shapes), rows=shapes[0][0])

    def flatten(self, batch: Any) -> list[np.ndarray]:
        """Returns the leaves of a batch of this structure as host arrays of its dtypes.

        Raises:
          BatchError: A leaf is no array of numbers, or lies on other processes.
        """
        return [
            host_array(leaf, name).astype(dtype, copy=False)
            for leaf, name, dtype in zip(
                jax.tree.leaves(batch), self.names, self.dtypes, strict=True
            )
        ]


def _dtype(leaf: Any) -> Any:
    """An array's dtype as JAX canonicalises it; a torch tensor's own dtype has no meaning to it."""
    dtype = leaf.dtype if isinstance(leaf, np.ndarray | jax.Array) else _as_numpy(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _as_numpy(leaf: Any) -> np.ndarray:
    try:
        return np.asarray(leaf)
    except TypeError:
        # A torch tensor of bfloat16, which NumPy by itself does not know.
        if not hasattr(leaf, "__dlpack__"):
            raise
        return np.asarray(jax.dlpack.from_dlpack(leaf))


def host_array(leaf: Any, name: str) -> np.ndarray:
    """Converts a batch leaf to NumPy.

    Raises:
      BatchError: The leaf is no array of numbers, or lies on other processes.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise BatchError(
            f"{name} is spread over several processes. Give host arrays (NumPy), or arrays of "
            "this process: multimesh places the batch itself."
        )
    try:
        array = _as_numpy(leaf)
    except Exception as exc:
        raise BatchError(f"{name} must be an array. Got {type(leaf).__name__}: {exc}") from exc
    if array.dtype == object or array.dtype.kind in "USM":
        raise BatchError(f"{name} must be an array of numbers. Got {array.dtype} ({leaf!r:.60}).")
    return array


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
        self.to_compare = _COMPARED
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
