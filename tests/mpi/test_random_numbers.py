"""Dropout and mutable collections equal the same step, microbatch by microbatch, on one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from support import cases, sequential

from multimesh.errors import UsageError
from multimesh.jax import Task, clear_tasks, fetch, register_task
from multimesh.jax.flax import parallelize_eval, parallelize_step

pytestmark = pytest.mark.mpi(ranks=(1, 2))

KEYS = {"dropout": jax.random.key(7)}
# Adam divides by the gradient's size; eps keeps rounding in tiny gradients from mattering.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
STEPS = 3


def build(model, layout, rows, microbatches, **options):
    clear_tasks()
    for index, mesh in enumerate(layout.meshes()):
        register_task(f"layer_{index}", task=Task(mesh=mesh, logical_axes=cases.LOGICAL_AXES))
    return parallelize_step(
        model,
        OPTIMIZER,
        loss_fn=functools.partial(sequential.loss_fn, model),
        init_fn=lambda key, batch: model.init({"params": key, "dropout": key}, batch["x"]),
        global_batch=sequential.make_batch(rows, 0),
        num_microbatches=microbatches,
        reduction="mean",
        **options,
    )


def check(model, layout, rows, microbatches, **options):
    step_fn, state, mesh = build(model, layout, rows, microbatches, **options)
    params, collections = fetch(state.params), fetch(getattr(state, "collections", {}))
    batches = [sequential.make_batch(rows, seed) for seed in range(STEPS)]
    losses = []
    for batch in batches:
        loss, state = step_fn(state, batch)
        losses.append(float(loss))
    expected = sequential.train(
        model, OPTIMIZER, params, collections, options.get("rngs", {}), step_fn.plan.sizes, batches
    )
    # Every rank may print how far the training is.
    assert int(state.step) == STEPS
    got = losses, fetch(state.params), fetch(getattr(state, "collections", {}))
    for ours, theirs in zip(got, expected, strict=True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), ours, theirs
        )
    return state, mesh


LAYOUTS = {"apart": cases.apart(2), "wide": cases.wide(2), "four stages": cases.wide(4)}


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_dropout():
    _check_dropout("apart", 10, 4)


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize(
    ("layout", "rows", "microbatches"), [("apart", 8, 1), ("wide", 8, 4), ("four stages", 8, 2)]
)
def test_dropout_on_4_ranks(layout, rows, microbatches):
    _check_dropout(layout, rows, microbatches)


def _check_dropout(layout, rows, microbatches):
    layout = LAYOUTS[layout]
    model = sequential.Layers(len(layout.devices), dropout=True)
    check(model, layout, rows, microbatches, rngs=KEYS)


@pytest.mark.parametrize(
    ("layout", "rows", "microbatches"),
    [("apart", 10, 4), ("wide", 8, 1), ("wide", 8, 4)],
)
def test_batch_norm(layout, rows, microbatches):
    model = sequential.Layers(2, dropout=True, norm=True)
    options = {"rngs": KEYS, "mutable": ["batch_stats"]}
    state, mesh = check(model, LAYOUTS[layout], rows, microbatches, **options)
    variables = {**fetch(state.params), **fetch(state.collections)}
    batch = sequential.make_batch(rows, 9)
    evaluate = parallelize_eval(
        lambda params, batch: model.apply(params, batch["x"], training=False),
        state,
        mesh,
        global_batch=batch,
        num_microbatches=microbatches,
    )
    expected = model.apply(variables, batch["x"], training=False)
    np.testing.assert_allclose(evaluate(state, batch), expected, rtol=2e-5, atol=2e-6)


def test_statistics_live_with_their_stage():
    model = sequential.Layers(2, norm=True)
    _, state, _ = build(model, cases.apart(2), 8, 2, mutable=["batch_stats"])
    stats = state.collections["batch_stats"]
    places = [jax.tree.leaves(stats[f"layer_{i}"])[0].sharding.device_set for i in range(2)]
    assert [{jax.devices().index(d) for d in place} for place in places] == [{0}, {4}]
    # Building the step has not touched them.
    for leaf in jax.tree.leaves(fetch(stats)):
        assert np.ravel(leaf)[0] in (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rngs": 3}, "rngs must be a dict"),
        ({"rngs": {"dropout": 3}}, "rngs must be a dict"),
        ({"mutable": ["params"]}, 'without "params"'),
        ({"mutable": ["no_such"]}, "no_such"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        build(sequential.Layers(2, norm=True), cases.apart(2), 8, 2, **options)
