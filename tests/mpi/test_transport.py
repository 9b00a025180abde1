"""The transport between ranks keeps the contract, and does what only it can do."""

import gc
from functools import partial

import jax
import numpy as np
import pytest
from support.synchronous import Synchronous
from support.transport_contract import *  # noqa: F403
from support.transport_contract import (
    BACK,
    FRONT,
    RESHARDINGS,
    check,
    deliver,
    numbers,
    put,
    send,
    sharding,
    take,
    test_both_sides_send_first,
    test_bundle_of_small_and_large_values,
    test_microbatches_in_flight_are_taken_in_any_order,
    test_steady_state_of_a_pipeline,
    transfer_of,
)

from multimesh import _mpi
from multimesh.errors import StallError, UsageError
from multimesh.transport import connect
from multimesh.transport.group import MpiGroup
from multimesh.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4))
several_ranks = pytest.mark.mpi(ranks=(2, 4))


@pytest.fixture
def group():
    return MpiGroup(_mpi.communicator(), stall_timeout=30)


@pytest.fixture
def open_transport(group):
    """Makes transports with poisoned buffers, and closes them when every rank is done."""
    transports = []

    def make(communicator=None, stall_timeout=30, **settings):
        communicator = communicator or _mpi.communicator()
        transport = MpiTransport(communicator, stall_timeout, poison=True, **settings)
        transports.append(transport)
        return transport

    yield make
    for transport in transports:
        transport.close()
    group.barrier("test")


@pytest.fixture
def transport(open_transport):
    return open_transport()


@pytest.mark.parametrize(
    "case",
    [
        partial(test_both_sides_send_first, nbytes=8),
        partial(test_both_sides_send_first, nbytes=32 << 10),
        partial(test_both_sides_send_first, nbytes=4 << 20),
        test_steady_state_of_a_pipeline,
        test_microbatches_in_flight_are_taken_in_any_order,
        test_bundle_of_small_and_large_values,
    ],
)
def test_nothing_relies_on_eager_messages(open_transport, case):
    case(open_transport(Synchronous(_mpi.communicator())))


@several_ranks
def test_a_message_that_is_never_received_is_named(open_transport, group):
    transport = open_transport(Synchronous(_mpi.communicator()), stall_timeout=0.2)
    value = numbers((8,), np.float32)
    transfer = transfer_of([value], *RESHARDINGS["one to one"], name="F0 -> F7")
    channel = transport.open(transfer, depth=1)
    last = group.size - 1
    if group.rank == 0:
        send(channel, transfer, 4, [value])
        expected = f"for rank {last} to receive microbatch 4 of F0 -> F7 from rank 0"
        with pytest.raises(StallError, match=expected):
            transport.flush()
    group.barrier("test")
    check(take(channel, transfer, 4), transfer, [value])


@pytest.mark.parametrize("limit", [7, 100, 4096])
def test_long_messages_are_split(open_transport, limit):
    transport = open_transport(message_limit=limit)
    deliver(transport, [numbers((16, 16), np.float32), numbers((8,), np.int8)], FRONT, BACK)
    deliver(transport, [numbers((16, 64), np.float32)], *RESHARDINGS["rows to columns"])


@pytest.mark.parametrize("limit", [4, 100, 2**31 - 1])
def test_objects_of_all_ranks(limit):
    group = MpiGroup(_mpi.communicator(), stall_timeout=30, message_limit=limit)
    everyone = [{"rank": rank, "text": "x" * 97 * rank} for rank in range(group.size)]
    mine, last = everyone[group.rank], group.size - 1
    assert group.allgather(mine, "test") == everyone
    assert group.gather(mine, "test", last) == (everyone if group.rank == last else None)
    assert group.broadcast(mine, "test", last) == everyone[last]


@several_ranks
def test_a_message_that_never_comes_is_named(open_transport, group):
    transport = open_transport(stall_timeout=0.2)
    transfer = transfer_of([numbers((8,), np.float32)], *RESHARDINGS["one to one"], name="F0 -> F7")
    channel = transport.open(transfer, depth=1)
    last = group.size - 1
    if group.rank == last:
        channel.post(2)
        expected = f"0.2 s for rank 0 to send microbatch 2 of F0 -> F7 to rank {last}"
        with pytest.raises(StallError, match=expected):
            channel.take(2)


@several_ranks
def test_a_rank_that_skips_its_own_part_is_told(open_transport):
    transport = open_transport()
    value = numbers((24, 24), np.float32)
    transfer = transfer_of([value], *RESHARDINGS["the same devices"], name="F0 -> F1")
    channel = transport.open(transfer, depth=1)
    with pytest.raises(StallError, match=r"F0 -> F1: rank \d took .* before it sent its own part"):
        channel.take(0)
    send(channel, transfer, 0, [value])
    check(take(channel, transfer, 0), transfer, [value])


@several_ranks
def test_an_array_that_is_not_as_planned_is_refused(open_transport):
    transfer = transfer_of([numbers((8,), np.float32)], *RESHARDINGS["one to one"], name="F0 -> F1")
    channel = open_transport().open(transfer, depth=1)
    wrong = put(numbers((4,), np.float32), sharding([0], (1,), FRONT[2]))
    if wrong is not None:
        with pytest.raises(UsageError, match=r"F0 -> F1: .*Got float32\(4,\).* expected float32"):
            channel.send(0, [wrong])


@several_ranks
def test_two_transports_on_one_communicator_in_turn(open_transport, group):
    for _ in range(2):
        transport = open_transport()
        deliver(transport, [numbers((8,), np.float32)], FRONT, BACK)
        transport.close()
        group.barrier("test")


def test_buffers_are_reused(open_transport):
    """Over many microbatches the pool stays small, although JAX lets go of buffers late."""
    transport = open_transport()
    transfer = transfer_of([numbers((1 << 16,), np.float32)], *RESHARDINGS["one to one"])
    channel = transport.open(transfer, depth=2)
    double = jax.jit(lambda x: x * 2)
    result = None
    for k in range(300):
        channel.post(k)
        send(channel, transfer, k, [np.full(1 << 16, k, np.float32)])
        arrays = take(channel, transfer, k)
        if arrays is not None:
            result = double(arrays[0])
            assert float(result[0]) == 2 * k
    assert not hasattr(channel, "_pool") or channel._pool.made < 20


def test_connect_follows_the_number_of_ranks():
    group, transport = connect()
    assert (group.rank, group.size) == (jax.process_index(), jax.process_count())
    deliver(transport, [numbers((8,), np.float32)], FRONT, BACK)
    transport.close()
    group.barrier("test")


@several_ranks
def test_a_dropped_channel_gives_up_its_receives(open_transport, group):
    transport = open_transport()
    value = numbers((8,), np.float32)
    transfer = transfer_of([value], *RESHARDINGS["one to one"])
    channel = transport.open(transfer, depth=1)
    channel.post(0)
    del channel
    gc.collect()
    group.barrier("test")
    deliver(transport, [value], *RESHARDINGS["one to one"])
