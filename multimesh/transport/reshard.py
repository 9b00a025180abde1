"""Which piece of which shard goes where, when a value moves from one sharding to another.

Pure planning: no data, no MPI. Every rank computes the same plan from the same two layouts.

    source, rows over 2 devices        target, columns over 2 devices
        +-----------+                      +-----+-----+
        |  a     b  |  device 0            |  a  |  b  |
        +-----------+              ->      |     |     |
        |  c     d  |  device 1            |  c  |  d  |
        +-----------+                      +-----+-----+
                                            dev 2 dev 3
    pieces: a: 0 -> 2, b: 0 -> 3, c: 1 -> 2, d: 1 -> 3
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Sharding

from multimesh.transport.base import Layout

__all__ = ["Block", "Box", "Piece", "blocks", "plan"]

Box = tuple[tuple[int, int], ...]
"""A rectangle of an array: (start, stop) along each dimension."""


@dataclass(frozen=True)
class Block:
    """A shard, together with the devices of one process that hold a copy of it.

    Attributes:
      box: Which part of the global array it is.
      process: The process of the devices.
      devices: In the order of the sharding.
    """

    box: Box
    process: int
    devices: tuple[jax.Device, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle that goes from one source shard to one target block.

    Attributes:
      source: The device whose shard it is cut from.
      target: The block that it becomes part of.
      cut: Where it lies in the source shard.
      place: Where it lies in the target shard.
      cut_whole: Whether it is all of the source shard.
      place_whole: Whether it is all of the target shard.
    """

    source: jax.Device
    target: Block
    cut: tuple[slice, ...]
    place: tuple[slice, ...]
    cut_whole: bool
    place_whole: bool

    @property
    def is_shard(self) -> bool:
        """Whether it is a whole shard on both sides, so that it needs no cutting."""
        return self.cut_whole and self.place_whole

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rectangle."""
        return tuple(part.stop - part.start for part in self.place)


def plan(source: Layout, target: Layout) -> tuple[Piece, ...]:
    """Plans how one value moves.

    Every element of every target block is covered by exactly one piece. A block is sent once to a
    process, whatever the number of its devices that hold it. Of several devices that hold the same
    source shard, one on the target's process is preferred, then the one that sends least.

    Args:
      source: The value as it is.
      target: The value as it is to be, with the same shape and dtype.

    Returns:
      The pieces, ordered by target block.
    """
    holders: dict[Box, list[jax.Device]] = {}
    for device, box in _boxes(source.sharding, source.shape):
        holders.setdefault(box, []).append(device)
    load: Counter[int | jax.Device] = Counter()  # elements sent, by process and by device
    pieces = []
    for block in blocks(target):
        for shard, devices in holders.items():
            overlap = _overlap(shard, block.box)
            if overlap is None:
                continue
            giver = _choose(devices, block, load)
            if giver.process_index != block.process:
                load[giver.process_index] += _size(overlap)
                load[giver] += _size(overlap)
            pieces.append(
                Piece(
                    source=giver,
                    target=block,
                    cut=_within(overlap, shard),
                    place=_within(overlap, block.box),
                    cut_whole=overlap == shard,
                    place_whole=overlap == block.box,
                )
            )
    return tuple(pieces)


def blocks(layout: Layout) -> tuple[Block, ...]:
    """Groups the shards of a value by process and content, in the order of the sharding."""
    devices: dict[tuple[int, Box], list[jax.Device]] = {}
    for device, box in _boxes(layout.sharding, layout.shape):
        devices.setdefault((device.process_index, box), []).append(device)
    return tuple(Block(box, process, tuple(group)) for (process, box), group in devices.items())


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[jax.Device, Box]]:
    """Each device with the part of the array that it holds."""
    return [
        (device, tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)))
        for device, index in sharding.devices_indices_map(shape).items()
    ]


def _overlap(one: Box, other: Box) -> Box | None:
    """The rectangle common to both, or None where there is no element in it."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _choose(devices: list[jax.Device], block: Block, load: Counter) -> jax.Device:
    """The best holder to take a piece from; the first one among equals."""
    return min(
        devices,
        key=lambda device: (
            device.process_index != block.process,
            device not in block.devices,
            load[device.process_index],
            load[device],
        ),
    )


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The rectangle in coordinates of a rectangle that contains it."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
