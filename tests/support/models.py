"""Small Flax models, each with one trait that pipelines get wrong.

They are ordinary Flax: no multimesh name, only module names and logical axes. Each takes the
whole batch, so that `model.init(key, batch)` works, and the activations are smooth, so that
rounding cannot push a unit over a kink and spoil a comparison.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

__all__ = [
    "Auxiliary",
    "Echo",
    "EncoderDecoder",
    "Mlp",
    "Scaler",
    "SelfSupervised",
    "Transformer",
    "UntiedHead",
]

# Uniform: a normal distribution would take most of the compiler's time.
_kernel_init = nn.initializers.xavier_uniform()
_partitioned = partial(nn.with_partitioning, _kernel_init, ("data", "model"))


class Layer(nn.Module):
    """A dense layer and a tanh; its kernel is partitioned unless `ragged`."""

    features: int
    residual: bool = False
    ragged: bool = False

    @nn.compact
    def __call__(self, x):
        x = with_sharding_constraint(x, P("batch"))
        kernel_init = _kernel_init if self.ragged else _partitioned()
        y = jnp.tanh(nn.Dense(self.features, kernel_init=kernel_init)(x))
        return x + y if self.residual else y


class Mlp(nn.Module):
    """Layers `layer_0`, `layer_1`, ...: (rows, features) -> (rows, widths[-1]).

    Attributes:
      widths: Features of each layer.
      numbers: The numbers in the layers' names; 0, 1, 2, ... when empty.
      residual: Whether each layer adds its input, which keeps deep stacks trainable.
      ragged: Whether the kernels are left whole because their widths do not divide.
    """

    widths: Sequence[int]
    numbers: Sequence[int] = ()
    residual: bool = False
    ragged: bool = False

    @nn.compact
    def __call__(self, batch):
        x = batch["inputs"]
        numbers = self.numbers or range(len(self.widths))
        for number, width in zip(numbers, self.widths, strict=True):
            layer = Layer(width, self.residual, self.ragged, name=f"layer_{number}")
            x = layer(x)
        return x


class SelfSupervised(nn.Module):
    """An Mlp whose output is its own loss, for the default `loss_fn`."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            x = Layer(width, name=f"layer_{i}")(x)
        return (x * x).sum()


class Auxiliary(nn.Module):
    """`layer_0` gives a second output, a balancing loss computed where the layer runs."""

    width: int = 16

    @nn.compact
    def __call__(self, batch):
        hidden = Layer(self.width, name="layer_0")(batch["inputs"])
        gate = nn.softmax(nn.Dense(6, kernel_init=_kernel_init, name="gate")(hidden))
        balance = jnp.square(gate).sum(axis=-1)
        return Layer(self.width, name="layer_1")(hidden), balance


class Attention(nn.Module):
    """Attention with one head, from `x` to `memory`."""

    width: int

    @nn.compact
    def __call__(self, x, memory, mask=None):
        # No biases: a softmax does not see the key's bias, so its gradient is pure rounding,
        # which Adam would blow up to the size of a learning rate.
        dense = partial(nn.Dense, use_bias=False, kernel_init=_partitioned())
        query = dense(self.width, name="query")(x)
        key, value = jnp.split(dense(2 * self.width, name="memory")(memory), 2, axis=-1)
        scores = query @ key.mT / self.width**0.5
        scores = scores if mask is None else jnp.where(mask, scores, -1e9)
        return nn.softmax(scores) @ value


class Block(nn.Module):
    """A small transformer block; attends to `memory` too where there is one."""

    width: int

    @nn.compact
    def __call__(self, x, memory=None, mask=None):
        x = with_sharding_constraint(x, P("batch"))
        y = nn.LayerNorm()(x)
        x = x + Attention(self.width, name="attention")(y, y, mask)
        if memory is not None:
            x = x + Attention(self.width, name="cross_attention")(x, memory)
        y = nn.gelu(nn.Dense(2 * self.width, kernel_init=_partitioned())(x))
        return x + nn.Dense(self.width, kernel_init=_partitioned())(y)


class Transformer(nn.Module):
    """A causal language model whose head is its embedding table: (rows, length) -> logits."""

    blocks: int = 2
    vocabulary: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, batch):
        tokens = batch["tokens"]
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=_partitioned(), name="embed")
        position = self.param("position", _kernel_init, (tokens.shape[1], self.width))
        mask = nn.make_causal_mask(tokens)[:, 0]
        x = embed(tokens) + position
        for i in range(self.blocks):
            x = Block(self.width, name=f"block_{i}")(x, mask=mask)
        return embed.attend(nn.LayerNorm(name="final_norm")(x))


class UntiedHead(nn.Module):
    """An embedding, blocks, and a `head` of its own: (rows, length) -> logits."""

    blocks: int = 2
    vocabulary: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=_partitioned(), name="embed")
        x = embed(batch["tokens"])
        for i in range(self.blocks):
            x = Block(self.width, name=f"block_{i}")(x)
        return nn.Dense(self.vocabulary, kernel_init=_partitioned(), name="head")(x)


class EncoderDecoder(nn.Module):
    """Every decoder block reads the encoder's output: (rows, length) -> logits."""

    blocks: int = 1
    vocabulary: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, batch: Mapping):
        embed = partial(nn.Embed, self.vocabulary, self.width, embedding_init=_partitioned())
        memory = embed(name="source_embed")(batch["source"])
        for i in range(self.blocks):
            memory = Block(self.width, name=f"encoder_{i}")(memory)
        x = embed(name="target_embed")(batch["tokens"])
        for i in range(self.blocks):
            x = Block(self.width, name=f"decoder_{i}")(x, memory)
        return nn.Dense(self.vocabulary, kernel_init=_partitioned(), name="head")(x)


class Scaler(nn.Module):
    """Repeats its input up to `features`, times a weight that starts at one: exact and cheap."""

    features: int

    @nn.compact
    def __call__(self, x):
        x = with_sharding_constraint(x, P("batch"))
        x = jnp.tile(x, self.features // x.shape[-1])
        return x * self.param("scale", nn.initializers.ones, (self.features,))


class Echo(nn.Module):
    """Scalers `layer_0`, `layer_1`, ...: hands each row's number through them unchanged.

    Attributes:
      widths: Features of each scaler, each a multiple of those before.
    """

    widths: Sequence[int]

    @nn.compact
    def __call__(self, batch):
        x = batch["inputs"]
        for i, width in enumerate(self.widths):
            x = Scaler(width, name=f"layer_{i}")(x)
        return x
