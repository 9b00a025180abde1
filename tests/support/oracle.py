"""The step that every pipeline must equal: plain JAX, the whole batch, one device.

Nothing of multimesh runs here; the loss, gradients and optimizer are one `jax.jit`.
"""

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import multimesh.jax
from multimesh.jax import Weighted

__all__ = [
    "assert_close",
    "assert_same_training",
    "assert_tree_close",
    "evaluate",
    "one_device",
    "train",
    "train_pipeline",
]

# Splitting a sum over microbatches and devices reorders float32 additions. Each costs up to
# 6e-8 of the terms' size; a few hundred of them, through a few layers and steps, stay under 2e-5.
# A wrong normalisation or a lost microbatch is off by 1e-2 or more.
RTOL = 2e-5
ATOL = 2e-6

STATE_FIELDS = ("step", "params", "opt_state")


@dataclass(frozen=True)
class Training:
    """Outcome of some steps, on the host.

    Attributes:
      outputs: What each step returned.
      update: What the first step added to the parameters: the gradient, under SGD.
      state: The state after the last step: "step", "params" and "opt_state".
      live: That state where it lies; None for the plain step.
    """

    outputs: list
    update: Any
    state: Any
    live: Any = None


@contextlib.contextmanager
def one_device():
    """A mesh of one local device in which the models' logical axes mean nothing."""
    axes = ("batch", "data", "model")
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), axes)
    with jax.set_mesh(mesh):
        yield


def train(case, batches, key=None, restore=None) -> Training:
    """Trains a case in plain JAX, one step for each batch.

    Args:
      case: What to train.
      batches: A batch for each step.
      key: For the parameters.
      restore: From the initial state to the one to start from, if that is another.
    """
    key = jax.random.key(42) if key is None else key
    with one_device():
        state = jax.jit(functools.partial(_initial_state, case))(key, batches[0])
        state = state if restore is None else restore(state)
        step = jax.jit(functools.partial(_plain_step, case))
        return replace(_train(step, state, batches, fetch=_host), live=None)


def train_pipeline(step_fn, state, batches) -> Training:
    """Runs a built step once for each batch."""
    return _train(step_fn, state, batches, fetch=lambda tree: _host(multimesh.jax.fetch(tree)))


def _train(step, state, batches, fetch):
    before = fetch(state.params)
    outputs = []
    for batch in batches:
        output, state = step(state, batch)
        outputs.append(_host(output))
        if len(outputs) == 1:
            update = jax.tree.map(np.subtract, fetch(state.params), before)
    host = {name: fetch(getattr(state, name)) for name in STATE_FIELDS}
    return Training(outputs, update, host, state)


def evaluate(case, params, batch):
    """The model's outputs for a batch, from parameters on the host."""
    with one_device():
        return np.asarray(jax.jit(case.model.apply)(params, batch))


def _initial_state(case, key, batch):
    params = case.model.init(key, batch)
    state = TrainState.create(apply_fn=case.model.apply, params=params, tx=case.optimizer)
    # A Python 0 would be compiled for apart from the int32 counters of later steps.
    return state.replace(step=np.int32(0))


def _plain_step(case, state, batch):
    loss_fn = case.loss_fn or case.model.apply

    def value(params):
        loss, metrics = loss_fn(params, batch) if case.has_aux else (loss_fn(params, batch), {})
        return _quotient(loss), {name: _quotient(metric) for name, metric in metrics.items()}

    (loss, metrics), grads = jax.value_and_grad(value, has_aux=True)(state.params)
    optimizer = optax.with_extra_args_support(case.optimizer)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, value=loss)
    params = optax.apply_updates(state.params, updates)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return ((loss, metrics) if case.has_aux else loss), state


def _quotient(value):
    return value.sum / value.weight if isinstance(value, Weighted) else value


def _host(tree):
    """The tree as numpy arrays without partitioning boxes."""
    # Not nn.unbox: it would constrain what is inside, which may have lost the axes of its box.
    unboxed = jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, nn.Partitioned) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
    )
    return jax.tree.map(_numbers, unboxed)


def _numbers(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same_training(got: Training, expected: Training):
    """Every step's outputs and every leaf of the state agree to float32 tolerance."""
    for step, (ours, theirs) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        assert_tree_close(ours, theirs, f"output of step {step}")
    assert_tree_close(got.update, expected.update, "first update")
    assert_tree_close(got.state, expected.state, "state")


def assert_tree_close(got, expected, label):
    """Two trees have the same leaves, named by their paths, with close values."""
    got, expected = _leaves(got), _leaves(expected)
    assert got.keys() == expected.keys(), label
    for path, value in expected.items():
        assert_close(got[path], value, f"{label}{path}")


def assert_close(got, expected, label=""):
    """Two arrays have the same shape and dtype, and close values; integers are equal."""
    assert got.shape == expected.shape, label
    assert got.dtype == expected.dtype, label
    # What counts is the error beside the largest entry: small entries are differences of large
    # ones, so their relative error has no bound.
    scale = float(np.max(np.abs(expected), initial=0)) if expected.dtype.kind == "f" else 0
    np.testing.assert_allclose(got, expected, RTOL, max(ATOL, RTOL * scale), err_msg=label)


def _leaves(tree):
    return {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(tree)}
