"""Models whose stages hand on what has no simple gradient, or is not one array of floats."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

__all__ = ["Masked", "Mixed", "Passing", "Skipping", "Tied"]

_kernel_init = nn.initializers.xavier_uniform()


def _dense(width, name=None):
    return nn.Dense(width, kernel_init=_kernel_init, name=name)


class Pair(NamedTuple):
    """What stage 0 of `Mixed` hands on, among other things."""

    hidden: jax.Array
    others: Any


class Sender(nn.Module):
    """Returns a dict with a value of every kind."""

    @nn.compact
    def __call__(self, batch):
        h = jnp.tanh(_dense(8)(batch["inputs"]))
        draw = jax.vmap(lambda label: jax.random.fold_in(jax.random.key(1), label))
        return {
            "pair": Pair(h, [jnp.tanh(_dense(4)(h)), None]),
            "mask": h > 0,
            "index": jnp.argmax(h, axis=-1),
            "count": 3,
            "flag": True,
            "complex": h[:, :4] + 1j * h[:, 4:],
            "half": h.astype(jnp.bfloat16),
            "key": jax.random.key(3),
            "raw key": jax.random.PRNGKey(7),
            "a key for each row": draw(batch["labels"]),
            "unused": jnp.sin(h),
            "labels": batch["labels"],
        }


class Receiver(nn.Module):
    """Reads all of it but `unused`, each in a way of its own."""

    @nn.compact
    def __call__(self, sent):
        h, (side, nothing) = sent["pair"]
        assert nothing is None and sent["flag"] is True
        h = jnp.where(sent["mask"], h, 0.5 * h) * sent["count"]
        h += jax.nn.one_hot(sent["index"], 8) + jax.nn.one_hot(sent["labels"], 8)
        h += jnp.abs(sent["complex"] * (1 + 0.5j)).repeat(2, axis=-1)
        h += sent["half"].astype(jnp.float32)
        h += jax.random.normal(sent["key"], (8,)) + jax.random.normal(sent["raw key"], (8,))
        h += jax.vmap(lambda key: jax.random.normal(key, (8,)))(sent["a key for each row"])
        return _dense(16)(jnp.tanh(_dense(8)(h)) + side.repeat(2, axis=-1))


class Mixed(nn.Module):
    """Two stages with a value of every kind between them."""

    @nn.compact
    def __call__(self, batch):
        return Receiver(name="layer_1")(Sender(name="layer_0")(batch))


class Middle(nn.Module):
    """Changes integers, a mask and complex numbers, and hands them on."""

    @nn.compact
    def __call__(self, x, index, mask, numbers):
        return jnp.tanh(_dense(8)(x)) * mask, index + 1, ~mask, numbers * 1j


class Skipping(nn.Module):
    """Three stages; the last reads what both others made, and a batch leaf that the first reads."""

    @nn.compact
    def __call__(self, batch):
        x = jnp.tanh(_dense(8, "layer_0")(batch["inputs"]))
        index = jnp.argmax(batch["inputs"], axis=-1)
        y, index, mask, numbers = Middle(name="layer_1")(x, index, x > 0, jax.lax.complex(x, 2 * x))
        y += x + jax.nn.one_hot(index, 8) + mask + numbers.real - numbers.imag
        return _dense(16, "layer_2")(jnp.concatenate([y, batch["inputs"]], axis=-1))


class Masked(nn.Module):
    """Every one of three stages reads the same mask of rows."""

    @nn.compact
    def __call__(self, batch):
        x, mask = batch["inputs"], batch["labels"][:, None] % 2 == 0
        for i in range(3):
            x = jnp.tanh(_dense(16, f"layer_{i}")(jnp.where(mask, x, 0.0)))
        return x


class Sine(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * jnp.sin(x)


class Passing(nn.Module):
    """Three stages, one of them without parameters; `stopped`: no gradient passes stage 0.

    Attributes:
      empty: The stage without parameters; -1 for none.
      stopped: Whether the gradient stops behind stage 0.
    """

    empty: int = -1
    stopped: bool = False

    @nn.compact
    def __call__(self, batch):
        x = batch["inputs"]
        for i in range(3):
            layer = Sine(name=f"layer_{i}") if i == self.empty else _dense(16, f"layer_{i}")
            x = jnp.tanh(layer(x))
            x = jax.lax.stop_gradient(x) if self.stopped and i == 0 else x
        return x


class Reader(nn.Module):
    """Attends to the rows of a table that another module owns, and hands it on as it sees it."""

    @nn.compact
    def __call__(self, x, table):
        x = jnp.tanh(_dense(8)(x))
        return x + nn.softmax(x @ table.T) @ table, jnp.broadcast_to(table, (len(x), *table.shape))


class Tied(nn.Module):
    """A table that every stage reads; `layer_0` starts equal to it, but is not tied.

    Attributes:
      readers: The stages behind the first.
      copies: Whether to return the table as each of them sees it, once for each row.
    """

    readers: int = 2
    copies: bool = False

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(32, 8, embedding_init=_waves, name="embed")
        x = embed(batch["tokens"]) + nn.Embed(32, 8, embedding_init=_waves, name="layer_0")(
            batch["tokens"]
        )
        seen = []
        for i in range(self.readers):
            x, table = Reader(name=f"layer_{i + 1}")(x, embed.embedding)
            seen.append(table)
        return seen if self.copies else x @ embed.embedding.T


def _waves(key, shape, dtype):
    """The same numbers for every parameter of a shape."""
    return jnp.sin(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape)
