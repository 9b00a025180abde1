"""A pipeline over several ranks equals plain JAX. Every rank runs this file, with 8 devices in all.

Rank 0 computes the plain step for all, and each test compares on every rank.
"""

import functools

import jax
import numpy as np
import pytest
from support import cases, oracle, plans, ranks

from multimesh.jax import fetch
from multimesh.jax.flax import parallelize_eval

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4))

ROWS, STEPS = 32, 2
SIZE = jax.process_count()
SPLITS = {2: [1, 1], 4: [1, 1, 1, 1]}  # layers of each stage

LAYOUTS = {
    "one device, 2 stages": cases.apart(2),
    "one device, 4 stages": cases.apart(4),
    "four devices": cases.wide(2),
    "four devices, square": cases.wide(2, (2, 2)),
    "two devices, 4 stages": cases.wide(4),
    "one submesh": cases.on_one(2, range(4)),
    # With 2 ranks both submeshes span both ranks; with 4, ranks {0, 2} and {1, 3}.
    "interleaved": cases.Layout(((0, 1, 4, 5), (2, 3, 6, 7)), (4, 1)),
    # With 4 ranks both submeshes span ranks {0, 1}, and two ranks have nothing to do.
    "the same ranks": cases.Layout(((0, 2), (1, 3)), (2, 1)),
    # With 4 ranks they span {0, 1} and {1, 2}.
    "ranks that overlap": cases.Layout(((1, 2), (3, 4)), (2, 1)),
}

# Each pair of (loss, microbatches, schedule) and each pair with a layout appears about once.
ON_ANY_RANKS = [
    ("mean", 1, "1f1b", "one device, 2 stages"),
    ("sum", 8, "1f1b", "one device, 4 stages"),
    ("weighted", 2, "1f1b", "four devices"),
    ("sum", 4, "1f1b", "four devices, square"),
    ("weighted", 8, "gpipe", "two devices, 4 stages"),
    ("weighted", 1, "1f1b", "one submesh"),
    ("sum", 1, "gpipe", "interleaved"),
    ("weighted", 4, "gpipe", "the same ranks"),
    ("mean", 8, "1f1b", "ranks that overlap"),
]
ON_2_RANKS = [
    ("sum", 2, "gpipe", "one device, 2 stages"),
    ("weighted", 4, "1f1b", "one device, 4 stages"),
    ("mean", 8, "gpipe", "four devices"),
    ("mean", 2, "1f1b", "two devices, 4 stages"),
    ("mean", 4, "1f1b", "interleaved"),
]
FULL_MATRIX = [
    (reduction, microbatches, schedule, layout)
    for reduction in ("mean", "sum", "weighted")
    for microbatches in (1, 2, 4, 8)
    for schedule, layout in (
        ("1f1b", "one device, 2 stages"),
        ("gpipe", "four devices"),
        ("1f1b", "interleaved"),
    )
    if (reduction, microbatches, schedule, layout) not in ON_ANY_RANKS + ON_2_RANKS
]


def name(combination):
    return "-".join(map(str, combination))


def _train(case, batches):
    return ranks.computed_once(oracle.train, case, batches)


@functools.cache
def _plain(stages, reduction):
    case = cases.mlp(SPLITS[stages], reduction)
    return _train(case, case.batches(ROWS, STEPS))


def _check(reduction, microbatches, schedule, layout):
    layout = LAYOUTS[layout]
    stages = len(layout.devices)
    case = cases.mlp(SPLITS[stages], reduction)
    step_fn, state, _ = cases.build(case, layout, ROWS, microbatches, schedule=schedule)
    got = oracle.train_pipeline(step_fn, state, case.batches(ROWS, STEPS))
    oracle.assert_same_training(got, _plain(stages, reduction))


@pytest.mark.parametrize("combination", ON_ANY_RANKS, ids=name)
def test_equals_plain_jax(combination):
    _check(*combination)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("combination", ON_2_RANKS, ids=name)
def test_equals_plain_jax_on_2_ranks(combination):
    _check(*combination)


@pytest.mark.slow
@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("combination", FULL_MATRIX, ids=name)
def test_equals_plain_jax_in_every_combination(combination):
    _check(*combination)


def _check_model(name, arrange):
    case = cases.CASES[name]
    batches = case.batches(16, STEPS)
    step_fn, state, _ = cases.build(case, arrange(case.stage_count), 16, 4)
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, _train(case, batches))


@pytest.mark.slow
@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("name", cases.CASES)
def test_every_model_equals_plain_jax(name):
    _check_model(name, cases.wide)


@pytest.mark.parametrize("name", ["ragged_3", "metrics"])
def test_uneven_models_equal_plain_jax(name):
    _check_model(name, cases.apart)


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_local_batches_are_shares_of_the_whole(reduction):
    case = cases.mlp(SPLITS[2], reduction)
    layout = cases.wide(2)
    built = cases.build(case, layout, ROWS, 2, local_batch=case.make_batch(ROWS, 0))
    prepare = built.prepare_batch
    readers = {jax.devices()[position].process_index for position in layout.devices[0]}
    assert prepare.num_shares == len(readers)

    batches = case.batches(ROWS * prepare.num_shares, STEPS)
    mine = slice(prepare.share * ROWS, (prepare.share + 1) * ROWS)
    local = [prepare({name: leaf[mine] for name, leaf in batch.items()}) for batch in batches]
    got = oracle.train_pipeline(built.step_fn, built.train_state, local)
    oracle.assert_same_training(got, _train(case, batches))


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 2), ("1f1b", 8), ("gpipe", 4)])
def test_rows_of_different_microbatches_never_meet(schedule, microbatches):
    case = cases.echo([4, 4, 4, 4])
    batch = case.make_batch(8, 0)
    step_fn, state, _ = cases.build(case, cases.apart(4), 8, microbatches, schedule=schedule)
    loss, state = step_fn(state, batch)
    expected = np.square(batch["labels"]).sum()
    assert loss == expected
    for scale in jax.tree.leaves(fetch(state.params)):
        np.testing.assert_array_equal(scale, 1 - expected / 4)


def test_evaluation_returns_rows_in_their_order():
    case = cases.mlp(SPLITS[2])
    layout = cases.wide(2)
    _, state, mesh = cases.build(case, layout, ROWS)
    batch = case.make_batch(ROWS, 5)
    evaluate = parallelize_eval(
        case.model, state, mesh=mesh, global_batch=batch, num_microbatches=4
    )
    expected = ranks.computed_once(oracle.evaluate, case, fetch(state.params), batch)
    oracle.assert_close(np.asarray(evaluate(state, batch)), expected)


# ---------------------------------------------------------------- what each rank holds and does


def test_a_rank_compiles_only_its_tasks_and_only_once():
    case = cases.mlp(SPLITS[4])
    with ranks.noted_compilations() as at_first:
        step_fn, state, _ = cases.build(case, cases.apart(4), ROWS, 4)
    mine, every = plans.programs(step_fn)
    assert sorted(name for name in at_first if name in every) == mine
    assert plans.compilations(step_fn) == len(mine)
    if SIZE > 1:
        assert len(mine) < len(every)

    with ranks.noted_compilations() as later:
        for batch in case.batches(ROWS, 3):
            loss, state = step_fn(state, batch)
        float(loss)
    assert not later


def test_a_rank_holds_only_its_stages():
    case = cases.CASES["apply_if_finite"]  # parameters and Adam's moments
    _, state, _ = cases.build(case, cases.apart(2), ROWS)
    held, whole = ranks.state_bytes(state)
    assert sum(ranks.everywhere(held)) == whole
    assert max(ranks.everywhere(held)) == (whole if SIZE == 1 else whole / 2)


def test_messages_of_the_user_stay_apart():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    case = cases.echo([4, 4])
    batch = case.make_batch(8, 0)
    step_fn, state, _ = cases.build(case, cases.apart(2), 8, 4)
    inbox = np.zeros(4)
    receive = comm.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    loss, _ = step_fn(state, batch)
    assert loss == np.square(batch["labels"]).sum()
    send = comm.Isend(np.full(4, comm.rank + 1.0), right, tag=3)
    status = MPI.Status()
    MPI.Request.Waitall([receive, send], [status, MPI.Status()])
    assert status.Get_source() == left and status.Get_tag() == 3
    np.testing.assert_array_equal(inbox, left + 1.0)
