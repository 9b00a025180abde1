"""Memory is reused when its last reader is gone, and not before."""

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from multimesh.transport.buffers import ALIGNMENT, BufferPool
from multimesh.transport.upload import COPY_UP_TO, uploads

LARGE = COPY_UP_TO + 4


def sharding(position=0):
    return jax.sharding.SingleDeviceSharding(jax.devices()[position])


def as_array(buffer, position=0):
    """A float32 array of a leased buffer, made as the transport makes it."""
    host = buffer.view(np.float32)
    (upload,) = uploads([jax.ShapeDtypeStruct(host.shape, host.dtype)], [sharding(position)])
    (array,) = upload.call([host])
    return array


@pytest.mark.parametrize("nbytes", [1, 8, 4096, 1 << 20])
def test_leases_are_aligned(nbytes):
    buffer = BufferPool().lease(nbytes)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), np.uint8)
    assert buffer.ctypes.data % ALIGNMENT == 0


def test_a_buffer_returns_when_the_last_view_is_gone():
    pool = BufferPool()
    buffer = pool.lease(64)
    view = buffer[8:24].view(ml_dtypes.bfloat16).reshape(2, 4)[1]
    address = buffer.ctypes.data
    del buffer
    assert pool.lease(64).ctypes.data != address
    del view
    assert address in {b.ctypes.data for b in [pool.lease(64), pool.lease(64)]}
    assert pool.made == 2


def test_reserved_buffers_are_used_first():
    pool = BufferPool()
    pool.reserve(256, count=3)
    leases = [pool.lease(256) for _ in range(3)]
    assert pool.made == 3
    assert len({lease.ctypes.data for lease in leases}) == 3


def test_poison_is_nan_before_every_use():
    pool = BufferPool(poison=True)
    for _ in range(2):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
            buffer = pool.lease(64)
            assert np.isnan(buffer.view(dtype).astype(np.float64)).all()
            buffer.fill(0)
    assert pool.made == 2  # one, and one while the first was still held by `buffer`


def test_a_large_buffer_becomes_the_array():
    pool = BufferPool()
    buffer = pool.lease(LARGE)
    array = as_array(buffer, position=3)
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data
    assert array.sharding == sharding(3)


def test_a_small_buffer_is_copied():
    buffer = BufferPool().lease(COPY_UP_TO)
    buffer.fill(1)
    array = as_array(buffer)
    array.block_until_ready()
    buffer.fill(2)
    assert np.asarray(array).tobytes() == b"\1" * COPY_UP_TO


@pytest.mark.parametrize("nbytes", [1024, LARGE, 1 << 22])
def test_a_running_computation_keeps_its_input(nbytes):
    pool = BufferPool(poison=True)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, y: y + jnp.sin(x + i), x))
    expected = np.asarray(slow(np.full(nbytes // 4, 0.5, np.float32)))
    for _ in range(5):
        buffer = pool.lease(nbytes)
        buffer.view(np.float32)[:] = 0.5
        result = slow(as_array(buffer))
        del buffer  # the array is gone too
        gc.collect()
        pool.lease(nbytes)  # would poison what is still read
        np.testing.assert_array_equal(np.asarray(result), expected)


def test_the_pool_stays_small_though_jax_lets_go_late():
    pool = BufferPool()
    double = jax.jit(lambda x: x * 2)
    for _ in range(200):
        double(as_array(pool.lease(LARGE))).block_until_ready()
    assert pool.made < 20


def test_bundles_are_uploaded_in_order_to_their_devices():
    sizes = [8, LARGE, 16, 8, LARGE]
    shapes = [jax.ShapeDtypeStruct((size,), np.uint8) for size in sizes]
    places = [sharding(position) for position in (0, 1, 1, 0, 2)]
    hosts = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    seen = []
    for upload in uploads(shapes, places):
        arrays = upload.call([hosts[i] for i in upload.indices])
        for i, array in zip(upload.indices, arrays, strict=True):
            assert array.sharding == places[i]
            np.testing.assert_array_equal(array, hosts[i])
            seen.append(i)
    assert sorted(seen) == [0, 1, 2, 3, 4]
