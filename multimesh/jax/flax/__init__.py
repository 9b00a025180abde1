"""Pipeline-parallel steps for Flax models."""

from multimesh.jax.flax._eval import parallelize_eval
from multimesh.jax.flax._modules import shard_axes, task
from multimesh.jax.flax._train import GlobalStep, LocalStep, parallelize_step

__all__ = [
    "GlobalStep",
    "LocalStep",
    "parallelize_eval",
    "parallelize_step",
    "shard_axes",
    "task",
]
