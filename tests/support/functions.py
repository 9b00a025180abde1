"""Functions of parameters and a batch for `parallelize`, in plain JAX but for their tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from multimesh.jax import TaskMesh, fetch, parallelize, task, with_sharding_constraint
from support import oracle

__all__ = [
    "HIDDEN",
    "WIDTH",
    "Pair",
    "agrees",
    "aligned",
    "batch",
    "halves",
    "pair_on",
    "positions",
    "row",
    "same",
]

WIDTH, HIDDEN = 8, 16


def row(first, count, axis="model"):
    """A submesh of devices in a row."""
    return TaskMesh(range(first, first + count), (axis,), (count,))


def halves(count):
    """The first and the last half of some devices; of one, itself twice."""
    half = max(1, count // 2)
    return range(half), range(count - half, count)


def positions(array):
    """Where an array lies: positions in `jax.devices()`, sorted."""
    known = {device: index for index, device in enumerate(jax.devices())}
    return sorted(known[device] for device in array.sharding.device_set)


def batch(rows=12, seed=0, width=WIDTH):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def aligned(array):
    """A copy at an address that JAX's CPU devices would use in place."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def same(got, expected, label=""):
    """The values of two trees agree to float32 tolerance; the first may lie on any rank."""
    oracle.assert_tree_close(_numbers(fetch(got)), _numbers(expected), label)


def _numbers(tree):
    return jax.tree.map(lambda leaf: oracle._numbers(jnp.asarray(leaf)), tree)


def agrees(fun, params, batch, **options):
    """Parallelizes a function, and compares it with itself in plain JAX.

    Args:
      fun: `(params, batch) -> results`.
      params: On the host.
      batch: Likewise.
      options: Of `parallelize`.

    Returns:
      The sharded function and its results.
    """
    sharded, init = parallelize(fun, initial_batch=batch, **options)
    got = sharded(init(params), batch)
    same(got, jax.jit(fun)(params, batch))
    return sharded, got


class Pair:
    """Two products, each a task: rows of the first parameter are split, columns of the second.

    Attributes:
      first, second: The tasks.
    """

    optimizer = optax.adam(1e-2)

    def __init__(self, first, second):
        self.first = task(self._first, "first", mesh=first)
        self.second = task(self._second, "second", mesh=second)

    @staticmethod
    def _first(w, x):
        return jnp.tanh(x @ with_sharding_constraint(w, P("model", None)))

    @staticmethod
    def _second(w, h):
        return h @ with_sharding_constraint(w, P(None, "model"))

    def init(self, key):
        a, b = jax.random.split(key)
        return {
            "a": jax.random.normal(a, (WIDTH, HIDDEN)),
            "b": jax.random.normal(b, (HIDDEN, WIDTH)),
        }

    def params(self):
        return self.init(jax.random.key(0))

    def forward(self, params, x):
        return self.second(params["b"], self.first(params["a"], x))

    def loss(self, params, x):
        return (self.forward(params, x) ** 2).mean()

    def init_state(self, key):
        params = self.init(key)
        return params, self.optimizer.init(params)

    def train(self, state, x):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(self.loss)(params, x)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        return loss, (optax.apply_updates(params, updates), opt_state)


def pair_on(count):
    """The pair on the first devices, half of them for each task; on one, both are there."""
    return Pair(*(row(part.start, len(part)) for part in halves(count)))
