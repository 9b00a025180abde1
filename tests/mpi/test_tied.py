"""A parameter that several stages use has one owner, and trains as under plain JAX."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from support import cases, plans
from support.agreement import trains_like_plain_jax
from support.boundaries import Tied

from multimesh.jax import fetch
from multimesh.jax.flax import parallelize_eval

pytestmark = pytest.mark.mpi(ranks=1)

TABLE = (32, 8)


def _tokens(rows, seed):
    return {"tokens": np.random.default_rng(seed).integers(32, size=(rows, 4)).astype(np.int32)}


def _loss(model, params, batch):
    logits = model.apply(params, batch)[:, :-1]
    targets = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _case(readers):
    return cases.Case(
        name=f"tied_{readers}",
        model=Tied(readers),
        optimizer=optax.adamw(1e-2, eps=1e-3),
        stages={"embed": 0} | {f"layer_{i}": i for i in range(readers + 1)},
        loop=(),
        make_batch=_tokens,
        loss=_loss,
    )


@pytest.mark.parametrize("readers", [1, 2])
def test_one_copy_a_step_to_each_stage_and_one_gradient_back(readers):
    step_fn, state, _ = cases.build(_case(readers), cases.apart(readers + 1), 8, 4)
    assert TABLE not in plans.loop_values(step_fn) and TABLE[::-1] not in plans.loop_values(step_fn)
    crossing = plans.moved_values(step_fn)
    assert sum(sorted(shape) == sorted(TABLE) for shape in crossing) == 2 * readers

    table, lookalike = (nn.unbox(state.params)["params"][name] for name in ("embed", "layer_0"))
    for leaf in jax.tree.leaves((table, lookalike)):
        assert plans.devices_of(leaf) == {0}
    np.testing.assert_array_equal(*map(jax.tree.leaves, fetch((table, lookalike))))


@pytest.mark.mpi(ranks=(1, 4))
def test_every_stage_sees_the_same_bits_after_twenty_steps():
    case = _case(2)
    built, training = trains_like_plain_jax(case, microbatches=4, steps=20)
    seen = parallelize_eval(
        Tied(2, copies=True), training.live, built.mesh, global_batch=case.make_batch(8, 0)
    )(training.live, case.make_batch(8, 0))
    table = training.state["params"]["params"]["embed"]["embedding"]
    assert len(seen) == 2
    for rows in seen:
        np.testing.assert_array_equal(rows, np.broadcast_to(table, rows.shape))
