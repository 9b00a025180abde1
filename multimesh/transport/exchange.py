"""A transfer as one rank sees it: the messages it sends and receives, and what stays at home.

Pure planning on top of `reshard`: pieces of a bundle between the same two ranks are put into
messages, and for every shard that this rank is to hold it is settled where it will lie in memory.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from multimesh.transport.base import Layout
from multimesh.transport.buffers import aligned
from multimesh.transport.reshard import Block, Piece, blocks, plan

__all__ = ["Arrival", "Exchange", "Message", "Part", "exchange"]

PACK_BELOW = 32 * 1024  # bytes: copying so little costs less than a message of its own


@dataclass(frozen=True)
class Part:
    """A piece in a message.

    Attributes:
      value: Which value of the bundle.
      piece: The rectangle.
      dtype: Of its elements.
      offset: Bytes from the start of the message, aligned so that it can be used in place.
    """

    value: int
    piece: Piece
    dtype: np.dtype
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the piece."""
        return _nbytes(self.piece.shape, self.dtype)

    def view(self, message: np.ndarray) -> np.ndarray:
        """The piece as an array inside the bytes of its message."""
        data = message[self.offset : self.offset + self.nbytes]
        return data.view(self.dtype).reshape(self.piece.shape)


@dataclass(frozen=True)
class Message:
    """What goes at once from one rank to another: one large piece, or all the small ones."""

    source: int
    target: int
    parts: tuple[Part, ...]

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the message."""
        return self.parts[-1].offset + self.parts[-1].nbytes


@dataclass(frozen=True)
class Arrival:
    """A target shard of this rank that comes together in host memory.

    Attributes:
      value: Which value of the bundle.
      block: The shard and the devices that hold it.
      dtype: Of its elements.
      in_place: The part of a message that is all of it, so that it is used where it was received;
        None if it is assembled in a buffer of its own.
      parts: Otherwise, the parts of messages that it is assembled from.
      cuts: And the pieces that come from shards of this rank.

    A part goes with the position of its message in `Exchange.incoming`.
    """

    value: int
    block: Block
    dtype: np.dtype
    in_place: tuple[int, Part] | None
    parts: tuple[tuple[int, Part], ...]
    cuts: tuple[Piece, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(stop - start for start, stop in self.block.box)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the shard."""
        return _nbytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Exchange:
    """Everything that one rank does for one instance of a transfer.

    Attributes:
      outgoing: Messages that it sends, in order.
      incoming: Messages that it receives, in order.
      copies: Whole shards that stay on this rank, each with its value: they need no host memory.
      arrivals: All its other target shards.
    """

    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]
    copies: tuple[tuple[int, Piece], ...]
    arrivals: tuple[Arrival, ...]


def exchange(sources: Sequence[Layout], targets: Sequence[Layout], rank: int) -> Exchange:
    """Plans one rank's part of a transfer.

    Args:
      sources: The values as they are; no key dtypes.
      targets: The values as they are to be.
      rank: Whose part; ranks are process indices.

    Returns:
      The part. The messages between two ranks are the same, in the same order, on both.
    """
    pieces = [
        (value, piece)
        for value, (source, target) in enumerate(zip(sources, targets, strict=True))
        for piece in plan(source, target)
    ]
    messages = list(_messages([p for p in pieces if not _is_local(p[1])], targets))
    local = [p for p in pieces if _is_local(p[1]) and p[1].target.process == rank]
    copies = tuple((value, piece) for value, piece in local if piece.is_shard)
    cuts = [(value, piece) for value, piece in local if not piece.is_shard]
    incoming = tuple(message for message in messages if message.target == rank)
    return Exchange(
        outgoing=tuple(message for message in messages if message.source == rank),
        incoming=incoming,
        copies=copies,
        arrivals=tuple(_arrivals(targets, rank, incoming, copies, cuts)),
    )


def _is_local(piece: Piece) -> bool:
    return piece.source.process_index == piece.target.process


def _messages(pieces: list[tuple[int, Piece]], layouts: Sequence[Layout]) -> Iterator[Message]:
    """Puts the small pieces between two ranks into one message, and each large one into its own."""
    small = defaultdict(list)
    for value, piece in pieces:
        ends = piece.source.process_index, piece.target.process
        part = Part(value, piece, np.dtype(layouts[value].dtype), offset=0)
        if part.nbytes < PACK_BELOW:
            small[ends].append(part)
        else:
            yield Message(*ends, (part,))
    for ends, parts in small.items():
        sizes = [aligned(part.nbytes) for part in parts]
        offsets = itertools.accumulate(sizes[:-1], initial=0)
        packed = (replace(part, offset=at) for part, at in zip(parts, offsets, strict=True))
        yield Message(*ends, tuple(packed))


def _arrivals(
    layouts: Sequence[Layout],
    rank: int,
    incoming: tuple[Message, ...],
    copies: tuple[tuple[int, Piece], ...],
    cuts: list[tuple[int, Piece]],
) -> Iterator[Arrival]:
    """Settles where each shard of this rank lies, but for those that are copied whole."""
    copied = {(value, piece.target) for value, piece in copies}
    received = defaultdict(list)
    for number, message in enumerate(incoming):
        for part in message.parts:
            received[part.value, part.piece.target].append((number, part))
    for value, layout in enumerate(layouts):
        for block in blocks(layout):
            if block.process != rank or (value, block) in copied:
                continue
            parts = tuple(received[value, block])
            whole = bool(parts) and parts[0][1].piece.place_whole
            yield Arrival(
                value,
                block,
                dtype=np.dtype(layout.dtype),
                in_place=parts[0] if whole else None,
                parts=() if whole else parts,
                cuts=tuple(piece for v, piece in cuts if (v, piece.target) == (value, block)),
            )


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
