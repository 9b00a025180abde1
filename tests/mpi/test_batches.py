"""Batches of any size, step after step, equal the whole step under plain JAX."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle, ranks

from multimesh.errors import BatchError
from multimesh.jax import fetch
from multimesh.jax.flax import parallelize_eval

pytestmark = pytest.mark.mpi(ranks=(1, 2))

ROWS = [10, 7, 3, 10]  # of each step; the step is built for the first


@pytest.mark.parametrize(
    ("reduction", "layout"),
    [("mean", cases.wide(2)), ("sum", cases.apart(2)), ("weighted", cases.apart(2))],
    ids=["mean", "sum", "weighted"],
)
def test_any_number_of_rows(layout, reduction):
    case = cases.mlp([1, 1], reduction)
    batches = [case.make_batch(rows, seed) for seed, rows in enumerate(ROWS)]
    expected = ranks.computed_once(oracle.train, case, batches)
    step_fn, state, *_ = cases.build(case, layout, ROWS[0], 4)
    oracle.assert_same_training(oracle.train_pipeline(step_fn, state, batches), expected)


def test_a_penalty_on_the_parameters_has_a_part_in_each_microbatch():
    plain = cases.mlp([1, 1])

    def penalized(model, params, batch):
        norm = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return plain.loss(model, params, batch) + 0.1 * norm

    case = replace(plain, loss=penalized)
    batches = [case.make_batch(rows, seed) for seed, rows in enumerate(ROWS)]
    expected = ranks.computed_once(oracle.train, case, batches)
    step_fn, state, *_ = cases.build(case, cases.apart(2), ROWS[0], 4)
    oracle.assert_same_training(oracle.train_pipeline(step_fn, state, batches), expected)


def test_microbatches_are_as_equal_as_can_be():
    case = cases.mlp([1, 1])
    step_fn, *_ = cases.build(case, cases.apart(2), 10, 4)
    assert step_fn.plan.sizes == (3, 3, 2, 2)
    # Two rows at a time spread over the two devices of each stage.
    step_fn, *_ = cases.build(case, cases.wide(2, total=4), 10, 4)
    assert step_fn.plan.sizes == (4, 2, 2, 2)


@pytest.mark.mpi(ranks=2)
def test_another_sequence_length():
    case = cases.CASES["encoder_decoder_2"]
    batches = [case.make_batch(8, seed) for seed in range(3)]
    batches[1] = jax.tree.map(lambda leaf: leaf[:, : leaf.shape[1] // 2], batches[1])
    expected = ranks.computed_once(oracle.train, case, batches)
    step_fn, state, *_ = cases.build(case, cases.apart(case.stage_count), 8, 4)
    compiled = step_fn.compile_count
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, expected)
    assert step_fn.compile_count == 2 * compiled  # the third batch has the shape of the first


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_evaluation_between_steps_of_other_sizes():
    case = cases.mlp([1, 1])
    step_fn, state, mesh = cases.build(case, cases.wide(2), 16, 4)
    outputs = parallelize_eval(case.model, state, mesh, global_batch=case.make_batch(16, 0))
    for seed, rows in enumerate((16, 5, 9, 16)):
        batch = case.make_batch(rows, seed)
        expected = oracle.evaluate(case, fetch(state.params), batch)
        np.testing.assert_allclose(outputs(state, batch), expected, rtol=2e-5, atol=2e-6)
        _, state = step_fn(state, case.make_batch(rows + 3, seed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf.astype(np.complex64), "as in the example batch"),
        (lambda leaf: leaf[None], "as in the example batch"),
        (lambda leaf: leaf[:0], "at least one"),
    ],
    ids=["dtype", "dimensions", "no rows"],
)
def test_what_is_no_batch_of_this_step(change, message):
    case = cases.mlp([1, 1])
    step_fn, state, *_ = cases.build(case, cases.apart(2), 8, 4)
    with pytest.raises(BatchError, match=message):
        step_fn(state, jax.tree.map(change, case.make_batch(8, 0)))
