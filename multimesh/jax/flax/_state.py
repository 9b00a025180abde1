"""The training state: how it is made, and which optimizer state belongs to which parameter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.batch import BatchSpec
from multimesh.initial import make_leaves
from multimesh.jax.flax._model import Model
from multimesh.source import Context
from multimesh.stages.trace import shapes, trace
from multimesh.step import Step

__all__ = ["Initialization", "MutableTrainState", "companions", "counter_sharding"]


class MutableTrainState(TrainState):
    """A Flax `TrainState` with the collections that the model updates.

    Attributes:
      collections: A dict from name to collection, such as `{"batch_stats": ...}`.
    """

    collections: Any = None


class Initialization:
    """The traced initialization of a `TrainState`."""

    def __init__(self, model: Model, optimizer, rng, spec: BatchSpec, names):
        """Prepares the trace.

        Args:
          model: What makes the variables.
          optimizer: The optax transformation.
          rng: The data and the implementation of the key.
          spec: The structure of the example batch.
          names: The logical axis names that are known.
        """
        self.data, self.impl = rng
        self.model = model
        self.optimizer = optimizer
        self.spec = spec
        self.names = names
        self._shapes: dict[int, TrainState] = {}

    def state(self, data: jax.Array, leaves: list) -> TrainState:
        """Makes the state, from the key's data and the batch's leaves."""
        key = data if self.impl is None else jax.random.wrap_key_data(data, impl=self.impl)
        params, collections = self.model.init(key, jax.tree.unflatten(self.spec.tree, leaves))
        state = self.model.state(params, collections, self.optimizer)
        return state.replace(step=jnp.asarray(state.step, jnp.int32))

    def _arguments(self, rows: int) -> tuple:
        leaves = [
            jax.ShapeDtypeStruct((rows, *shape[1:]), dtype)
            for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True)
        ]
        return jax.ShapeDtypeStruct(self.data.shape, self.data.dtype), leaves

    def shapes(self, rows: int) -> TrainState:
        """The shapes of the state for a batch of some rows; runs nothing."""
        if rows not in self._shapes:
            self._shapes[rows] = shapes(self.state, self._arguments(rows), self.names)
        return self._shapes[rows]

    def run(self, step: Step, context: Context, example: list[np.ndarray]) -> TrainState:
        """Makes the state's leaves, each where it lives."""
        shares = step.shares.count
        if shares > 1:  # an initializer may read the batch, so it gets all of it
            gathered = step.shares.gather(context.group, example)
            example = [np.concatenate(leaf) for leaf in zip(*gathered, strict=True)]
        closed = trace(self.state, self._arguments(self.spec.rows * shares), self.names)
        leaves = make_leaves(step, closed, [self.data, *example])
        return jax.tree.unflatten(step.state.tree, leaves)


def companions(state: TrainState) -> dict[int, int]:
    """Optimizer state that repeats the tree of the parameters: leaf -> parameter.

    A leaf belongs to the parameter whose path is the end of its own: `.opt_state[0].mu['w']` to
    `.params['w']`.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    root = jax.tree_util.GetAttrKey("params")
    parameters = {
        tuple(map(str, path[1:])): index
        for index, path in enumerate(paths)
        if path[0] == root and len(path) > 1
    }
    found = {}
    for index, path in enumerate(paths):
        if path[0] == root:
            continue
        keys = tuple(map(str, path))
        matches = (parameters.get(keys[start:]) for start in range(1, len(keys)))
        match = next((m for m in matches if m is not None), None)
        if match is not None:
            found[index] = match
    return found


def counter_sharding(state: TrainState, mesh: Mesh) -> dict[int, NamedSharding]:
    """How the number of the step lies: on all devices, so that every rank may read it.

    The random keys of a stage may be all that needs it, which would make it that stage's.

    Args:
      state: The state, or its shapes.
      mesh: All devices of the step.

    Returns:
      The leaf of the number, and its sharding.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    counter = next(i for i, path in enumerate(paths) if path == (jax.tree_util.GetAttrKey("step"),))
    return {counter: NamedSharding(mesh, PartitionSpec())}
