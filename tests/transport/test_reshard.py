"""The planner covers every target shard exactly once, and messages carry what it says."""

from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.transport_contract import RESHARDINGS, sharding

from multimesh.transport import Layout
from multimesh.transport.buffers import ALIGNMENT
from multimesh.transport.exchange import PACK_BELOW, exchange
from multimesh.transport.reshard import blocks, plan

SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclass(frozen=True)
class OverRanks:
    """A sharding as it is when the eight devices belong to several ranks."""

    real: jax.sharding.Sharding
    ranks: int

    def devices_indices_map(self, shape):
        return {
            Device(device.id, device.id * self.ranks // 8): index
            for device, index in self.real.devices_indices_map(shape).items()
        }


def layout(end, ranks, shape=(24, 24), dtype=np.float32):
    return Layout(shape, np.dtype(dtype), OverRanks(sharding(*end), ranks))


@st.composite
def ends(draw):
    sizes = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 3), (2, 4), (4, 2)]))
    devices = draw(st.permutations(range(8)))[: sizes[0] * sizes[1]]
    return devices, sizes, draw(st.sampled_from(SPECS))


def run(sources, targets, ranks, values):
    """What every rank of a transfer ends up with, on plain NumPy arrays."""
    plans = [exchange(sources, targets, rank) for rank in range(ranks)]

    def cut(value, piece):
        index = sources[value].sharding.devices_indices_map(values[value].shape)[piece.source]
        return values[value][index][piece.cut]

    wire = {}
    for mine in plans:
        for message in mine.outgoing:
            data = np.zeros(message.nbytes, np.uint8)
            for part in message.parts:
                part.view(data)[...] = cut(part.value, part.piece)
            wire.setdefault((message.source, message.target), []).append(data)
    for mine in plans:
        messages = [wire[m.source, m.target].pop(0) for m in mine.incoming]
        for value, piece in mine.copies:
            yield value, piece.target, cut(value, piece), 1
        for arrival in mine.arrivals:
            shard, covered = np.zeros(arrival.shape, arrival.dtype), np.zeros(arrival.shape, int)
            parts = [arrival.in_place] if arrival.in_place else arrival.parts
            for number, part in parts:
                shard[part.piece.place] = part.view(messages[number])
                covered[part.piece.place] += 1
            for piece in arrival.cuts:
                shard[piece.place] = cut(arrival.value, piece)
                covered[piece.place] += 1
            yield arrival.value, arrival.block, shard, covered
    assert not any(wire.values())  # every message had a receiver


@settings(max_examples=150, deadline=None)
@given(ends(), ends(), st.sampled_from([1, 2, 4, 8]))
def test_every_target_shard_is_covered_once_with_the_right_numbers(source, target, ranks):
    values = [
        np.arange(24 * 24, dtype=np.float32).reshape(24, 24),
        np.arange(24 * 2400, dtype=np.int16).reshape(24, 2400),  # larger than is packed
    ]
    sources, targets = (
        [layout(end, ranks, v.shape, v.dtype) for v in values] for end in (source, target)
    )
    seen = Counter()
    for value, block, shard, covered in run(sources, targets, ranks, values):
        assert np.all(covered == 1)
        expected = values[value][tuple(slice(*part) for part in block.box)]
        np.testing.assert_array_equal(shard, expected)
        seen[value, block] += 1
    assert seen == Counter((v, block) for v, to in enumerate(targets) for block in blocks(to))


def test_the_same_process_is_preferred():
    everywhere = layout((list(range(8)), (8,), P()), ranks=4)
    one = layout(([5], (1,), P()), ranks=4)
    (piece,) = plan(everywhere, one)
    assert piece.source == Device(5, 2)
    assert exchange([everywhere], [one], rank=2).arrivals == ()


def test_load_is_spread_over_replicas():
    front = layout(([0, 1, 2, 3], (4,), P()), ranks=4)
    back = layout(([4, 5, 6, 7], (4,), P("x")), ranks=4)
    assert sorted(piece.source.id for piece in plan(front, back)) == [0, 1, 2, 3]


def test_a_replicated_shard_goes_to_a_process_once():
    source = layout(([0], (1,), P()), ranks=2)
    target = layout(([4, 5, 6, 7], (4,), P()), ranks=2)
    (piece,) = plan(source, target)
    assert [device.id for device in piece.target.devices] == [4, 5, 6, 7]


def test_nothing_is_sent_of_an_empty_array():
    source, target = (layout(e, 2, shape=(24, 0)) for e in RESHARDINGS["four to two"])
    assert plan(source, target) == ()
    (arrival, *_) = exchange([source], [target], rank=1).arrivals
    assert arrival.nbytes == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_small_pieces_share_a_message_and_large_ones_do_not(rank):
    small, large = (8, 3), (8, PACK_BELOW)
    source, target = RESHARDINGS["four to two"]
    shapes = [small, large, small]
    sources = [layout(source, 2, shape) for shape in shapes]
    targets = [layout(target, 2, shape) for shape in shapes]
    mine = exchange(sources, targets, rank)
    messages = mine.incoming if rank else mine.outgoing
    assert (not mine.incoming) == (rank == 0)
    assert [len(message.parts) for message in messages] == [1, 1, 1, 1, 8]
    packed = messages[-1]
    assert {part.value for part in packed.parts} == {0, 2}
    assert all(part.offset % ALIGNMENT == 0 for part in packed.parts)
