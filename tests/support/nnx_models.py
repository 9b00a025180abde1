"""Small Flax NNX models, and the plain NNX training that their pipelines must equal.

The models are ordinary NNX: no multimesh name in them. Each is made by a function of its `Rngs`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from multimesh.jax import Weighted

__all__ = [
    "FEATURES",
    "Mlp",
    "Scanned",
    "Transformer",
    "mean_loss",
    "noise",
    "token_loss",
    "tokens",
    "train",
]

FEATURES = 8
VOCABULARY = 16

# Uniform: a normal distribution would take most of the compiler's time.
_kernel_init = nnx.initializers.xavier_uniform()


class Layer(nnx.Module):
    """A dense layer with what makes microbatches matter: statistics and random numbers."""

    def __init__(self, rngs, norm=True, dropout=True):
        self.linear = nnx.Linear(
            FEATURES, FEATURES, use_bias=not norm, kernel_init=_kernel_init, rngs=rngs
        )
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, x):
        x = self.linear(x)
        x = x if self.norm is None else self.norm(x)
        x = x if self.dropout is None else self.dropout(x)
        return jnp.tanh(x)


class RematLayer(Layer):
    """The same, recomputed in the backward pass."""

    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


class JitLayer(Layer):
    """The same, with a `jit` of its own."""

    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class SharedStreamLayer(nnx.Module):
    """A dense layer that draws from random numbers that the whole model shares."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, kernel_init=_kernel_init, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return jnp.tanh(self.dropout(self.linear(x), rngs=rngs))


class Mlp(nnx.Module):
    """Layers in a list: the scopes `layers/0`, `layers/1`, ..."""

    def __init__(self, layers, rngs, layer=Layer, **options):
        self.layers = nnx.List([layer(rngs, **options) for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SharedStream(nnx.Module):
    """Layers with one stream of random numbers, which lies on no layer's stage."""

    def __init__(self, layers, rngs):
        self.layers = nnx.List([SharedStreamLayer(rngs) for _ in range(layers)])
        self.rngs = rngs

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, self.rngs)
        return x


class Scanned(nnx.Module):
    """Stages of two layers each, stacked and scanned."""

    def __init__(self, stages, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Layer(rngs, norm=False)

        self.layers = nnx.List([stack(rngs) for _ in range(stages)])

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer, x):
            return layer(x)

        for layers in self.layers:
            x = apply(layers, x)
        return x


def _partitioned(*names):
    return nnx.with_partitioning(_kernel_init, names)


class Block(nnx.Module):
    """Causal attention with one head, and a feed-forward part over ("data", "model")."""

    def __init__(self, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.qkv = linear(FEATURES, 3 * FEATURES, kernel_init=_partitioned("data", "model"))
        self.up = linear(FEATURES, 2 * FEATURES, kernel_init=_partitioned("data", "model"))
        self.down = linear(2 * FEATURES, FEATURES, kernel_init=_partitioned("model", "data"))

    def attend(self, x):
        query, key, value = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        scores = query @ key.mT / FEATURES**0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return nnx.softmax(jnp.where(mask, scores, -1e9)) @ value

    def __call__(self, x):
        x = x + self.attend(x)
        return x + self.down(nnx.gelu(self.up(x)))


class Head(nnx.Module):
    """Logits by a table that belongs to the embedding too."""

    def __init__(self, table, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.table = table

    def __call__(self, x):
        return self.norm(x) @ self.table[...].T


class Transformer(nnx.Module):
    """A causal language model whose `head` shares the `nnx.Param` of `embed`."""

    def __init__(self, blocks, rngs):
        self.embed = nnx.Embed(VOCABULARY, FEATURES, embedding_init=_kernel_init, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.head = Head(self.embed.embedding, rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x)


def noise(rows, seed):
    """Rows of noise: "x" in, "y" to come out."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(rows, FEATURES)).astype(np.float32) for name in ("x", "y")}


def tokens(rows, seed):
    """Sequences of which the later rows are all padding."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 7, size=(rows, 1)) * (np.arange(rows) < rows - 2)[:, None]
    return {
        "tokens": random.integers(VOCABULARY, size=(rows, 6)).astype(np.int32),
        "mask": (np.arange(5) < lengths).astype(np.float32),
    }


def mean_loss(model, batch):
    """The mean square error."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def token_loss(model, batch):
    """The cross entropy of the next token, over those that count."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
    )
    return Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())


def train(model, optimizer, loss_fn, sizes, batches):
    """Trains a model in place: one microbatch after the other, on one device, in plain NNX.

    Args:
      model: The model.
      optimizer: An optax transformation.
      loss_fn: `mean_loss` or `token_loss`.
      sizes: The rows of each microbatch.
      batches: A batch for each step.

    Returns:
      The loss of each step.
    """

    def total(model, rows, share):
        loss = loss_fn(model, rows)
        return (loss.sum, loss.weight) if isinstance(loss, Weighted) else (loss * share, share)

    grad = nnx.jit(nnx.value_and_grad(total, has_aux=True))
    update = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    losses = []
    for batch in batches:
        sums = None
        for number, size in enumerate(sizes):
            start = sum(sizes[:number])
            rows = jax.tree.map(lambda leaf, s=start, n=size: leaf[s : s + n], batch)
            (value, weight), gradients = grad(model, rows, size / sum(sizes))
            parts = (value, weight, gradients)
            sums = parts if sums is None else jax.tree.map(jnp.add, sums, parts)
        value, weight, gradients = sums
        update.update(model, jax.tree.map(lambda g, w=weight: g / w, gradients))
        losses.append(np.asarray(value / weight))
    return losses
