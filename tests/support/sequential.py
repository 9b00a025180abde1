"""The step that a pipeline with dropout or mutable collections must equal: one microbatch after
another on one device, in plain JAX. Microbatches change the mathematics there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

__all__ = ["Layers", "loss_fn", "make_batch", "train"]

FEATURES = 8


class Layer(nn.Module):
    """A dense layer, with what makes microbatches matter."""

    dropout: bool
    norm: bool

    @nn.compact
    def __call__(self, x, training):
        # A norm takes the bias away again: its gradient would be rounding, which Adam blows up.
        x = nn.Dense(FEATURES, use_bias=not self.norm)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not training)(x)
            # Microbatches of another size add another number.
            seen = self.variable("batch_stats", "seen", lambda: jnp.int32(0))
            if training and not self.is_initializing():
                seen.value += x.shape[0]
        if self.dropout:
            x = nn.Dropout(0.5, deterministic=not training)(x)
        return nn.tanh(x)


class Layers(nn.Module):
    """As many layers as stages: `layer_0`, `layer_1` and so on."""

    stages: int
    dropout: bool = False
    norm: bool = False

    @nn.compact
    def __call__(self, x, training=True):
        for index in range(self.stages):
            x = Layer(self.dropout, self.norm, name=f"layer_{index}")(x, training)
        return x


def make_batch(rows, seed):
    """Rows of noise: "x" in, "y" to come out."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(rows, FEATURES)).astype(np.float32) for name in ("x", "y")}


def loss_fn(model, params, batch, **options):
    """The mean square error, with the updates of mutable collections if there are any."""
    result = model.apply(params, batch["x"], **options)
    out, updates = result if "mutable" in options else (result, None)
    loss = jnp.mean((out - batch["y"]) ** 2)
    return (loss, updates) if "mutable" in options else loss


def train(model, optimizer, params, collections, keys, sizes, batches):
    """Trains step by step, microbatch by microbatch.

    Args:
      model: `Layers`.
      optimizer: An optax transformation.
      params: The parameters to start from, on the host.
      collections: The mutable collections to start from, {} for none.
      keys: Base key of each kind of random numbers.
      sizes: The rows of each microbatch.
      batches: A batch for each step.

    Returns:
      The losses, the parameters and the collections.
    """
    opt_state = optimizer.init(params)
    losses = []
    grad = jax.jit(jax.value_and_grad(functools.partial(_loss, model), has_aux=True))
    for step, batch in enumerate(batches):
        total, gradients, start = 0.0, jax.tree.map(jnp.zeros_like, params), 0
        for number, size in enumerate(sizes):
            rows = {name: leaf[start : start + size] for name, leaf in batch.items()}
            start += size
            own = {
                name: jax.random.fold_in(jax.random.fold_in(key, step), number)
                for name, key in keys.items()
            }
            (loss, collections), part = grad(params, collections, own, rows)
            share = size / sum(sizes)
            total += loss * share
            gradients = jax.tree.map(lambda a, b, s=share: a + b * s, gradients, part)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(total))
    return losses, jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, collections)


def _loss(model, params, collections, keys, batch):
    options = {"rngs": keys} if keys else {}
    if not collections:
        return loss_fn(model, params, batch, **options), collections
    names = list(collections)
    return loss_fn(model, {**params, **collections}, batch, mutable=names, **options)
