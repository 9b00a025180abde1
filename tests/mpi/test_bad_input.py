"""Ranks that were given different things get one error, the same everywhere, and none hangs."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from support import cases, ranks

from multimesh.errors import RankMismatchError, RegistryError, UsageError
from multimesh.jax import fetch

CASE = cases.CASES["mlp"]
LAYOUT = cases.apart(2)
ROWS = 16
RANK = jax.process_index()
# The last rank is the odd one out.
ODD = jax.process_count() - 1 == RANK

pytestmark = pytest.mark.mpi(ranks=(2, 4))


def everywhere_refused(error, build):
    """Every rank raises `error` with the same message; returns it."""
    with pytest.raises(error) as caught:
        build()
    messages = set(ranks.everywhere(str(caught.value)))
    assert len(messages) == 1
    return messages.pop()


def test_different_registries():
    swapped = cases.Layout(LAYOUT.devices[::-1], LAYOUT.shape)
    layout = swapped if ODD else LAYOUT
    message = everywhere_refused(RankMismatchError, lambda: cases.build(CASE, layout, ROWS))
    assert f"rank {jax.process_count() - 1}" in message.lower()


def test_an_empty_registry_on_one_rank():
    case = replace(CASE, stages={}) if ODD else CASE
    everywhere_refused(RankMismatchError, lambda: cases.build(case, LAYOUT, ROWS))


def test_different_microbatch_counts():
    count = 4 if ODD else 2
    message = everywhere_refused(
        RankMismatchError, lambda: cases.build(CASE, LAYOUT, ROWS, microbatches=count)
    )
    assert "microbatch" in message


def test_different_schedules():
    schedule = "gpipe" if ODD else "1f1b"
    message = everywhere_refused(
        RankMismatchError, lambda: cases.build(CASE, LAYOUT, ROWS, 2, schedule=schedule)
    )
    assert "schedule" in message


def test_different_example_batches():
    rows = 8 if ODD else ROWS
    message = everywhere_refused(RankMismatchError, lambda: cases.build(CASE, LAYOUT, rows))
    assert "batch" in message


@pytest.mark.parametrize("same", [0, 2])
def test_different_batches_in_one_of_the_first_steps(same):
    """A `global_batch` is the same on every rank; one that was shuffled differently is not."""
    step_fn, state, _ = cases.build(CASE, LAYOUT, ROWS, 2)
    for seed in range(same):
        _, state = step_fn(state, CASE.make_batch(ROWS, seed))
    batch = CASE.make_batch(ROWS, seed=10 + RANK)
    message = everywhere_refused(RankMismatchError, lambda: step_fn(state, batch))
    assert "batch" in message


def test_different_calls():
    """One rank caught an error that the others did not have, say, and went on."""
    _, state, _ = cases.build(CASE, LAYOUT, ROWS)
    message = everywhere_refused(
        RankMismatchError,
        (lambda: cases.build(CASE, LAYOUT, ROWS)) if ODD else (lambda: fetch(state)),
    )
    assert "rank 0 is at fetch" in message
    assert f"rank {jax.process_count() - 1} at comparing registered tasks" in message
    fetch(state)  # they can go on


def test_different_shares_where_they_must_be_equal():
    """Both stages read the batch, so ranks of the second repeat a share of the first."""
    batch = CASE.make_batch(ROWS, 0)
    built = cases.build(CASE, LAYOUT, ROWS, 2, local_batch=batch)
    assert built.prepare_batch.num_shares == 1
    mine = CASE.make_batch(ROWS, seed=RANK)

    def step():
        built.step_fn(built.train_state, built.prepare_batch(mine))

    message = everywhere_refused(RankMismatchError, step)
    assert "batch" in message


def test_different_models():
    width = 32 if ODD else 16
    model = CASE.model.clone(widths=(width, 16))
    everywhere_refused(
        RankMismatchError, lambda: cases.build(replace(CASE, model=model), LAYOUT, ROWS)
    )


def test_different_constants():
    """A learning rate read from a file, say: the programs look alike."""
    case = replace(CASE, optimizer=optax.sgd(0.1 if ODD else 0.2))
    everywhere_refused(RankMismatchError, lambda: cases.build(case, LAYOUT, ROWS))


def test_different_closed_over_arrays():
    rates = np.float32([0.1, 0.2])[[int(ODD), 1]]
    case = replace(CASE, optimizer=optax.chain(optax.sgd(0.1), _scale_by(rates)))
    everywhere_refused(RankMismatchError, lambda: cases.build(case, LAYOUT, ROWS))


def _scale_by(rates):
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * rates.sum(), updates))


def test_different_keys():
    everywhere_refused(
        RankMismatchError,
        lambda: cases.build(CASE, LAYOUT, ROWS, rng=jax.random.key(int(ODD))),
    )


def test_fewer_rows_than_microbatches_is_the_same_error_everywhere():
    everywhere_refused(UsageError, lambda: cases.build(CASE, LAYOUT, rows=4, microbatches=8))


def test_a_parameter_that_does_not_divide_is_the_same_error_everywhere():
    """Ranks without the parameter must not go on to compile and wait for those that have it."""
    case = replace(CASE, model=CASE.model.clone(widths=(16, 6)))
    layout = cases.Layout(((0, 1, 2, 3), (4, 5, 6, 7)), (1, 4))
    message = everywhere_refused(RegistryError, lambda: cases.build(case, layout, ROWS))
    assert "layer_1" in message and "(16, 6)" in message


def test_a_mistake_on_one_rank_only():
    """One rank cannot build; the others learn why, and do not wait for it."""
    reduction = None if ODD else "mean"
    case = replace(CASE, reduction=reduction)
    everywhere_refused((RankMismatchError, UsageError), lambda: cases.build(case, LAYOUT, ROWS, 2))
