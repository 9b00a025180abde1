"""Models with rematerialization, loops, conditions, custom derivatives and lifted maps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

__all__ = ["Branches", "CutScan", "Lifted", "Remat", "RematPair", "Tricks"]

_kernel_init = nn.initializers.xavier_uniform()
WIDTH = 16


class Block(nn.Module):
    """Two dense layers; reads an index for each row, and a random key for a mask of features."""

    @nn.compact
    def __call__(self, x, index=None, key=None):
        y = jnp.tanh(nn.Dense(WIDTH, kernel_init=_kernel_init)(x))
        if index is not None:
            y = (y + jax.nn.one_hot(index, WIDTH)) * jax.random.bernoulli(key, 0.5, (WIDTH,))
        return x + jnp.sin(nn.Dense(WIDTH, kernel_init=_kernel_init)(y))


class Remat(nn.Module):
    """Every block is rematerialized by itself: two on stage 0, one on stage 1."""

    policy: Callable | None = None

    @nn.compact
    def __call__(self, batch):
        x, index, key = batch["inputs"], batch["labels"], jax.random.key(3)
        block = nn.remat(Block, policy=self.policy)
        for i in range(3):
            x = block(name=f"layer_{i}")(x, index, key)
        return x


class Pair(nn.Module):
    """A block of stage 0, then one of stage 1."""

    @nn.compact
    def __call__(self, x, index, key):
        x = Block(name="layer_0")(x, index, key)
        return Block(name="layer_1")(2 * x, index, key)


class RematPair(nn.Module):
    """Blocks of two stages are rematerialized together, within another remat."""

    policy: Callable | None = None

    @nn.compact
    def __call__(self, batch):
        pair = nn.remat(Pair, policy=self.policy)
        args = batch["labels"], jax.random.key(3)
        return nn.remat(lambda self, x: pair(name="pair")(x, *args))(self, batch["inputs"])


@jax.custom_vjp
def _thrice(x):
    return jnp.sin(x)


def _thrice_forward(x):
    return jnp.sin(x), (x, jnp.int32(3), x > 0)


def _thrice_backward(saved, gradient):
    x, three, positive = saved
    return (gradient * jnp.cos(x) * three * jnp.where(positive, 1.0, 0.5),)


_thrice.defvjp(_thrice_forward, _thrice_backward)


@jax.custom_jvp
def _twice(x):
    return jnp.cos(x)


@_twice.defjvp
def _twice_jvp(primals, tangents):
    return jnp.cos(*primals), 2.0 * tangents[0]


_TRICKS = {
    "custom_vjp": lambda x, w: _thrice(x * w),
    "custom_jvp": lambda x, w: _twice(x * w),
    "jit": jax.jit(lambda x, w: nn.gelu(x * w)),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x * w))),
    "cond": lambda x, w: jax.lax.cond(w[0] > 0, lambda x: jnp.sin(x * w), lambda x: x - w, x),
    "switch": lambda x, w: jax.lax.switch(jnp.int32(w[0]), [jnp.sin, lambda x: jnp.cos(x * w)], x),
    "fori_loop": lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x * w) + i, x),
    "while_loop": lambda x, w: _halved(jax.lax.stop_gradient(x)) * w,
    "scan": lambda x, w: jax.lax.scan(lambda x, t: (jnp.sin(x * w) + t, x), x, jnp.arange(3.0))[0],
    "associative_scan": lambda x, w: jax.lax.associative_scan(jnp.add, x * w / WIDTH, axis=-1),
    "map": lambda x, w: jax.lax.map(lambda row: jnp.sin(row * w), x),
    "vmap": lambda x, w: jax.vmap(lambda row: jnp.sin(jnp.outer(row, w) @ row))(x),
}


def _halved(x):
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 2), (0, x))[1]


class Tricks(nn.Module):
    """Applies every trick with a parameter of its own, so that its gradient is told apart."""

    @nn.compact
    def __call__(self, x):
        for name, trick in _TRICKS.items():
            w = self.param(name, nn.initializers.ones, (WIDTH,))
            x = x / 2 + jnp.tanh(trick(x, w))
        return x


class Stack(nn.Module):
    """A scan over three blocks with parameters `(3, ...)`, each rematerialized."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(lambda block, x, _: (block(x), None)),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(Block(name="blocks"), x, None)[0]


class Lifted(nn.Module):
    """A scan, an ensemble and calls under `jit`, each within a stage, then all the tricks."""

    @nn.compact
    def __call__(self, batch):
        x = Stack(name="layer_0")(batch["inputs"])
        ensemble = nn.vmap(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
        )
        x = nn.jit(ensemble)(name="layer_1")(x).mean(axis=0)
        return Tricks(name="layer_2")(x)


class Branches(nn.Module):
    """Takes the block of stage 0 or that of stage 1, as a parameter says."""

    @nn.compact
    def __call__(self, batch):
        blocks = [Block(name=f"layer_{i}") for i in range(2)]
        sign = self.param("sign", nn.initializers.ones, ())
        x = batch["inputs"]
        if self.is_initializing():
            return sum(block(x) for block in blocks)
        return nn.cond(
            sign > 0, lambda self, x: blocks[0](x), lambda self, x: blocks[1](x), self, x
        )


class CutScan(nn.Module):
    """A scan over pairs of blocks on two stages, which cannot be cut."""

    @nn.compact
    def __call__(self, batch):
        scan = nn.scan(
            lambda pair, x, _: (pair(x, batch["labels"], jax.random.key(3)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(Pair(name="pair"), batch["inputs"], None)[0]
