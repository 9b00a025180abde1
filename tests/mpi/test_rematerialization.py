"""Rematerialization, loops, conditions, custom derivatives and calls train like plain JAX."""

from dataclasses import replace

import jax
import optax
import pytest
from support import cases, plans
from support.agreement import trains_like_plain_jax
from support.tricky import Branches, CutScan, Lifted, Remat, RematPair

from multimesh.errors import PlacementError

pytestmark = pytest.mark.mpi(ranks=1)

POLICIES = {
    "nothing": None,
    "products": jax.checkpoint_policies.dots_saveable,
}


def _case(model, layers_per_stage):
    return replace(cases.mlp(layers_per_stage), model=model, optimizer=optax.sgd(0.1))


@pytest.mark.parametrize("policy", POLICIES)
def test_rematerialized_blocks_with_integers_and_keys(policy):
    built, _ = trains_like_plain_jax(_case(Remat(POLICIES[policy]), [2, 1]))
    # Whole blocks stay in one equation: XLA keeps what it recomputes apart.
    assert plans.remats(built.step_fn, "B0") == 2
    if policy == "nothing":  # the input of each block, and no activation inside of it
        assert plans.loop_tasks(built.step_fn) == ["B0", "F0", "FB1"]


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_two_stages_rematerialized_together(policy):
    built, _ = trains_like_plain_jax(_case(RematPair(POLICIES[policy]), [1, 1]))
    # What a stage recomputes stays there: one activation crosses, and one gradient comes back.
    assert plans.loop_tasks(built.step_fn) == ["B0", "F0", "FB1"]
    assert plans.loop_crossings(built.step_fn) == {
        ("F0", 1): ["float32[4,16]"],
        ("F1B1", 0): ["float32[4,16]"],
    }


@pytest.mark.mpi(ranks=2)
def test_loops_conditions_and_custom_derivatives():
    trains_like_plain_jax(_case(Lifted(), [1, 1, 1]), steps=2)


def test_a_condition_over_blocks_of_two_stages():
    trains_like_plain_jax(_case(Branches(), [1, 1]), steps=2)


def test_a_scan_over_blocks_of_two_stages():
    case = _case(CutScan(), [1, 1])
    with pytest.raises(PlacementError, match=r"`scan`.*layer_0 on .*layer_1 on .*separate mod"):
        cases.build(case, cases.apart(2), 8, 2)
