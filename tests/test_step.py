"""What a built step does with the caller's memory: batches are copied, states are donated."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from support.functions import aligned

from multimesh.errors import UsageError
from multimesh.jax import Task, TaskMesh, Weighted, clear_tasks, fetch, register_task
from multimesh.jax.flax import parallelize_step


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return (nn.Dense(3, name="head")(nn.relu(nn.Dense(16, name="body")(x))) ** 2).mean()


@pytest.fixture(autouse=True)
def stages():
    clear_tasks()
    register_task("body", task=Task(TaskMesh((0,), ("x",), (1,))))
    register_task("head", task=Task(TaskMesh((1,), ("x",), (1,))))
    yield
    clear_tasks()


def batch(seed=0):
    return np.random.default_rng(seed).normal(size=(256, 64)).astype(np.float32)


def build(optimizer=None, **options):
    options = {"num_microbatches": 2, "reduction": "mean"} | options
    return parallelize_step(Model(), optimizer or optax.sgd(0.1), **options)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_batch_may_be_overwritten_once_the_step_has_returned(microbatches):
    expected = []
    step_fn, state, _ = build(global_batch=batch(), num_microbatches=microbatches)
    for seed in range(4):
        loss, state = step_fn(state, batch(seed))
        expected.append(float(loss))

    step_fn, state, _ = build(global_batch=batch(), num_microbatches=microbatches)
    buffer, losses = aligned(batch()), []
    for seed in range(4):
        buffer[...] = batch(seed)
        loss, state = step_fn(state, buffer)
        buffer[...] = 1e6
        losses.append(loss)
    assert list(map(float, losses)) == expected


def test_a_prepared_batch_is_a_copy_and_may_be_used_again():
    step_fn, state, _, prepare_batch = build(local_batch=batch(), donate=False)
    buffer = aligned(batch())
    prepared = prepare_batch(buffer)
    buffer[...] = 1e6
    first, _ = step_fn(state, prepared)
    again, _ = step_fn(state, batch())
    assert first == again == step_fn(state, prepared)[0]


def test_a_donated_state_cannot_be_used_again():
    step_fn, state, _ = build(global_batch=batch())
    step_fn(state, batch())
    with pytest.raises(UsageError, match=r"params.*was donated to an earlier step"):
        step_fn(state, batch())


def test_a_state_is_kept_without_donation():
    step_fn, state, _ = build(global_batch=batch(), donate=False)
    before = fetch(state.params)
    first, _ = step_fn(state, batch())
    second, _ = step_fn(state, batch())
    assert first == second
    jax.tree.map(np.testing.assert_array_equal, before, fetch(state.params))


def test_fetched_numbers_outlive_the_donation_of_their_state():
    step_fn, state, _ = build(global_batch=batch())
    fetched = fetch(state.params)
    copy = jax.tree.map(np.array, fetched)
    step_fn(state, batch())
    jax.tree.map(np.testing.assert_array_equal, fetched, copy)


def test_an_optimizer_may_hold_a_random_key():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    step_fn, state, _ = build(noisy, global_batch=batch())
    first, state = step_fn(state, batch())
    second, state = step_fn(state, batch())
    assert second < first
    key = fetch(state.opt_state)[0].rng_key
    assert jax.random.key_data(key).shape == (2,)


def weighted(weight):
    def loss_fn(params, x):
        loss = Model().apply(params, x) * len(x)
        return Weighted(loss, weight(params, x))

    return loss_fn


def scale(params):
    return 1 + (params["params"]["head"]["bias"] ** 2).sum()


@pytest.mark.parametrize(
    "weight",
    [
        lambda params, x: (x[:, 0] > 0).sum(),
        lambda params, x: jax.lax.stop_gradient(scale(params)),
        lambda params, x: (scale(params) > 0) * 3.0,
    ],
    ids=["of the batch", "stopped", "of a comparison"],
)
def test_a_weight_without_a_gradient(weight):
    build(global_batch=batch(), loss_fn=weighted(weight), reduction=None)


def test_a_weight_that_depends_on_the_parameters():
    with pytest.raises(UsageError, match=r"must not depend on the parameters.*stop_gradient"):
        build(
            global_batch=batch(),
            loss_fn=weighted(lambda params, x: scale(params)),
            reduction=None,
        )
