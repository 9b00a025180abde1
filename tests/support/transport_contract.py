"""The contract that every transport keeps, as tests. They run on every rank at once.

A test module that imports them all defines the fixtures `transport` and `group`. There are eight
devices, whatever the number of ranks.
"""

import math

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multimesh.errors import UsageError
from multimesh.transport import Layout, Transfer

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "int32": np.int32,
    "bool": np.bool_,
    "complex64": np.complex64,
}

X, XY, YX, COLUMNS, BOTH = P("x"), P("x", "y"), P("y", "x"), P(None, "x"), P(("x", "y"))

RESHARDINGS = {
    # name: (source devices, mesh sizes, spec), the same for the target
    "one to one": (([0], (1,), P()), ([7], (1,), P())),
    "one to its neighbour": (([0], (1,), P()), ([1], (1,), P())),
    "four to two": (([0, 1, 2, 3], (4,), X), ([4, 5], (2,), X)),
    "two to four": (([0, 1], (2,), X), ([4, 5, 6, 7], (4,), X)),
    "rows to columns": (([0, 1, 2, 3], (4,), X), ([4, 5, 6, 7], (4,), COLUMNS)),
    "columns to rows": (([0, 1, 2, 3], (4,), COLUMNS), ([4, 5, 6, 7], (4,), X)),
    "replicated to sharded": (([0, 1, 2, 3], (4,), P()), ([4, 5, 6, 7], (4,), X)),
    "sharded to replicated": (([0, 1, 2, 3], (4,), X), ([4, 5, 6, 7], (4,), P())),
    "replicated to replicated": (([0, 1, 2, 3], (4,), P()), ([4, 5, 6, 7], (4,), P())),
    "two axes to one": (([0, 1, 2, 3], (2, 2), XY), ([4, 5, 6, 7], (2, 2), BOTH)),
    "transposed axes": (([0, 1, 2, 3], (2, 2), XY), ([6, 7, 4, 5], (2, 2), YX)),
    "half replicated": (([0, 1, 2, 3], (2, 2), X), ([4, 5, 6, 7], (2, 2), P("y"))),
    "all over to one": (([0, 1, 2, 3, 4, 5, 6, 7], (8,), X), ([3], (1,), P())),
    "one to all over": (([3], (1,), P()), ([0, 1, 2, 3, 4, 5, 6, 7], (8,), P())),
    "the same devices": (([0, 1, 2, 3, 4, 5, 6, 7], (8,), X), (list(range(8)), (8,), COLUMNS)),
    "nothing to do": (([0, 1, 2, 3, 4, 5, 6, 7], (8,), X), (list(range(8)), (8,), X)),
    "devices reversed": (([0, 1, 2, 3, 4, 5, 6, 7], (8,), X), (list(range(8))[::-1], (8,), X)),
    "overlapping": (([0, 1, 2, 3, 4, 5], (2, 3), X), ([2, 3, 4, 5, 6, 7], (3, 2), YX)),
    "across every rank": (([0, 2, 4, 6], (4,), X), ([1, 3, 5, 7], (2, 2), XY)),
}


def sharding(devices, sizes, spec):
    """A sharding on the devices at some positions of `jax.devices()`."""
    grid = np.array([jax.devices()[position] for position in devices]).reshape(sizes)
    return NamedSharding(Mesh(grid, ("x", "y")[: len(sizes)]), spec)


FRONT, BACK = ([0, 1, 2, 3], (4,), X), ([4, 5, 6, 7], (4,), X)


def numbers(shape, dtype, seed=0):
    """An array with a different content for every seed."""
    random = np.random.default_rng(seed)
    return random.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


def put(value, to):
    """The global array on the devices of a sharding; None on a rank without one of them."""
    if not to.addressable_devices:
        return None
    return jax.make_array_from_callback(value.shape, to, lambda index: value[index])


def transfer_of(values, source, target, name="F0 -> F1"):
    """A transfer of some host arrays; `source` and `target` are arguments of `sharding`."""
    ends = (
        tuple(Layout(v.shape, v.dtype, sharding(*end)) for v in values) for end in (source, target)
    )
    return Transfer(name, *ends)


def send(channel, transfer, microbatch, values):
    """Sends where this rank is a sender, and drops the arrays at once."""
    arrays = [put(v, layout.sharding) for v, layout in zip(values, transfer.sources, strict=True)]
    if arrays[0] is not None:
        channel.send(microbatch, arrays)


def take(channel, transfer, microbatch):
    """Takes where this rank is a receiver; elsewhere None."""
    if transfer.targets[0].sharding.addressable_devices:
        return channel.take(microbatch)
    return None


def check(arrays, transfer, values):
    """Compares what a rank took, shard by shard, bit for bit."""
    if arrays is None:
        return
    assert len(arrays) == len(values)
    for array, layout, value in zip(arrays, transfer.targets, values, strict=True):
        assert (array.shape, array.dtype) == (value.shape, value.dtype)
        assert array.sharding == layout.sharding
        for shard in array.addressable_shards:
            expected = value[shard.index]
            assert np.asarray(shard.data).tobytes() == expected.tobytes()


def deliver(transport, values, source, target):
    """Opens, posts, sends, takes and checks one bundle."""
    transfer = transfer_of(values, source, target)
    channel = transport.open(transfer, depth=1)
    channel.post(0)
    send(channel, transfer, 0, values)
    check(take(channel, transfer, 0), transfer, values)


@pytest.mark.parametrize("ends", RESHARDINGS.values(), ids=RESHARDINGS)
def test_reshard(transport, ends):
    deliver(transport, [numbers((24, 24), np.float32)], *ends)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtype_bit_for_bit(transport, dtype):
    with jax.enable_x64(True):
        deliver(transport, [numbers((8, 4), dtype)], FRONT, ([4, 5], (2,), COLUMNS))


def test_nan_payloads_and_signed_zeros_survive(transport):
    bits = np.array([0x7FC01234, 0x80000000, 0xFFFFFFFF, 0x00000001] * 2, np.uint32)
    deliver(transport, [bits.view(np.float32)], FRONT, BACK)


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)])
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys(transport, shape, implementation):
    keys = jax.random.key(7, impl=implementation)
    keys = jax.random.split(keys, math.prod(shape)).reshape(shape) if shape else keys
    spec = X if shape == (4,) else P()
    ends = [sharding([0, 1], (2,), spec), sharding([4, 5], (2,), spec)]
    transfer = Transfer("keys", *((Layout(shape, keys.dtype, end),) for end in ends))
    data = np.asarray(jax.random.key_data(keys))
    channel = transport.open(transfer, depth=1)
    channel.post(0)
    if ends[0].addressable_devices:
        channel.send(0, [jax.random.wrap_key_data(put(data, ends[0]), impl=implementation)])
    taken = take(channel, transfer, 0)
    if taken is not None:
        assert (taken[0].shape, taken[0].dtype) == (shape, keys.dtype)
        for shard in jax.random.key_data(taken[0]).addressable_shards:
            np.testing.assert_array_equal(shard.data, data[shard.index])


@pytest.mark.parametrize("shape", [(), (0,), (8, 0), (1,)])
def test_scalars_and_empty_arrays(transport, shape):
    deliver(transport, [numbers(shape, np.float32)], ([0, 1], (2,), P()), ([4, 5], (2,), P()))


@pytest.mark.parametrize("nbytes", [8, 4096, 32 << 10, 4 << 20, 64 << 20])
def test_sizes(transport, nbytes):
    one = ([0], (1,), P()), ([7], (1,), P())
    deliver(transport, [np.arange(nbytes // 4, dtype=np.int32)], *one)


def test_bundle_of_small_and_large_values(transport):
    values = [
        numbers((8, 8), np.float32, 1),
        numbers((8,), np.bool_, 2),
        numbers((8, 4096), np.float32, 3),
        numbers((8, 3), ml_dtypes.bfloat16, 4),
        numbers((8, 0), np.int8, 5),
        numbers((16,), np.complex64, 6),
    ]
    deliver(transport, values, FRONT, ([4, 5], (2,), X))
    deliver(transport, values, BACK, FRONT)


def test_microbatches_in_flight_are_taken_in_any_order(transport):
    values = [[numbers((8, 8), np.float32, seed=k)] for k in range(6)]
    transfer = transfer_of(values[0], FRONT, BACK)
    channel = transport.open(transfer, depth=2)  # more than this are in flight
    for k in range(6):
        channel.post(k)
    for k in range(6):
        send(channel, transfer, k, values[k])
    for k in (3, 0, 5, 1, 4, 2):
        check(take(channel, transfer, k), transfer, values[k])


def test_steady_state_of_a_pipeline(transport):
    """Activations forward and cotangents back, step after step, with every array dropped at once"""
    forward, backward = numbers((8, 64), np.float32, 1), numbers((8, 64), np.float32, 2)
    there = transfer_of([forward], FRONT, BACK)
    back = transfer_of([backward], BACK, FRONT, name="B1 -> B0")
    channels = [transport.open(there, depth=2), transport.open(back, depth=2)]
    for step in range(20):
        for k in range(4):
            channels[0].post(k)
            channels[1].post(k)
            send(channels[0], there, k, [forward + step])
            check(take(channels[0], there, k), there, [forward + step])
            send(channels[1], back, k, [backward - k])
            check(take(channels[1], back, k), back, [backward - k])
        transport.flush()


@pytest.mark.parametrize("nbytes", [8, 32 << 10, 4 << 20])
def test_both_sides_send_first(transport, nbytes):
    value = np.arange(nbytes // 8, dtype=np.int32).repeat(2)
    there = transfer_of([value], ([0], (1,), P()), ([7], (1,), P()))
    back = transfer_of([value], ([7], (1,), P()), ([0], (1,), P()))
    channels = [transport.open(there, depth=4), transport.open(back, depth=4)]
    for k in range(4):
        send(channels[0], there, k, [value + k])
        send(channels[1], back, k, [value - k])
    for k in range(4):
        check(take(channels[0], there, k), there, [value + k])
        check(take(channels[1], back, k), back, [value - k])


def test_take_without_post(transport):
    value = numbers((8, 8), np.float32)
    transfer = transfer_of([value], FRONT, BACK)
    channel = transport.open(transfer, depth=1)
    send(channel, transfer, 5, [value])
    check(take(channel, transfer, 5), transfer, [value])


def test_an_array_outlives_later_microbatches(transport):
    """What was received keeps its numbers while its buffer's successors come and go."""
    values = [numbers((8, 512), np.float32, seed=k) for k in range(12)]
    transfer = transfer_of(values[:1], FRONT, BACK)
    channel = transport.open(transfer, depth=1)
    kept = {}
    for k, value in enumerate(values):
        send(channel, transfer, k, [value])
        arrays = take(channel, transfer, k)
        if k % 3 == 0:
            kept[k] = arrays
    for k, arrays in kept.items():
        check(arrays, transfer, [values[k]])


def test_a_pending_computation_keeps_what_it_reads(transport):
    """Arrays are dropped while computations that read them still run."""
    value = numbers((4, 1 << 16), np.float32) / 100
    transfer = transfer_of([value], FRONT, BACK)
    channel = transport.open(transfer, depth=1)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda i, y: y + jax.numpy.sin(x + i), x))
    reference, results = None, []
    for k in range(6):
        send(channel, transfer, k, [value])
        arrays = take(channel, transfer, k)
        if arrays is None:
            continue
        shards = [shard.data for shard in arrays[0].addressable_shards]
        if k == 0:
            reference = [np.asarray(slow(shard)) for shard in shards]
        results.append([slow(shard) for shard in shards])
        del arrays, shards
    for result in results:
        for shard, expected in zip(result, reference, strict=True):
            np.testing.assert_array_equal(np.asarray(shard), expected)


def test_a_donated_source_is_sent_as_it_was(transport):
    """Donation is refused while a message still reads the memory."""
    value = numbers((1 << 18,), np.float32)
    transfer = transfer_of([value], ([0], (1,), P()), ([7], (1,), P()))
    channel = transport.open(transfer, depth=1)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = put(value, transfer.sources[0].sharding)
    if array is not None:
        channel.send(0, [array])
        overwrite(array).block_until_ready()
    check(take(channel, transfer, 0), transfer, [value])


def test_received_arrays_can_be_donated(transport):
    value = numbers((1 << 16,), np.float32)
    transfer = transfer_of([value], ([0], (1,), P()), ([7], (1,), P()))
    channel = transport.open(transfer, depth=1)
    overwrite = jax.jit(lambda x: x * 2, donate_argnums=0)
    for k in range(3):
        send(channel, transfer, k, [value + k])
        arrays = take(channel, transfer, k)
        if arrays is not None:
            np.testing.assert_array_equal(overwrite(arrays[0]), (value + k) * 2)


def test_different_values_at_the_ends_are_refused(transport):
    one, two = (Layout((n,), np.float32, sharding(*FRONT)) for n in (4, 8))
    with pytest.raises(UsageError, match=r"same shapes and dtypes.*\(4,\).*\(8,\)"):
        Transfer("F0 -> F1", (one,), (two,))


def test_group(group):
    assert 0 <= group.rank < group.size == jax.process_count()
    assert group.allgather({"rank": group.rank}, "test") == [{"rank": r} for r in range(group.size)]
    gathered = group.gather(group.rank, "test", root=0)
    assert gathered == (None if group.rank else list(range(group.size)))
    assert group.broadcast(("from", group.rank), "test", root=group.size - 1) == (
        "from",
        group.size - 1,
    )
    group.barrier("test")
