"""Whatever a stage hands on arrives, and nothing else crosses. The plain step is the oracle."""

from collections import Counter
from dataclasses import replace

import optax
import pytest
from support import cases, plans
from support.agreement import trains_like_plain_jax
from support.boundaries import Masked, Mixed, Passing, Skipping

pytestmark = pytest.mark.mpi(ranks=1)


def _case(model, stages):
    return replace(cases.mlp([1] * stages), model=model, optimizer=optax.sgd(0.1))


def _crossing(built):
    """What crosses for each microbatch, by the tasks that it comes from and goes to."""
    return {route: Counter(values) for route, values in plans.loop_crossings(built.step_fn).items()}


@pytest.mark.mpi(ranks=(1, 2))
def test_a_value_of_every_kind():
    built, _ = trains_like_plain_jax(_case(Mixed(), 2))
    crossing = _crossing(built)
    # Keys, counts, flags and labels are computed, or placed, where they are read.
    assert crossing["F0", 1] == Counter(
        {"float32[4,8]", "float32[4,4]", "bool[4,8]", "int32[4]", "complex64[4,4]"}
        | {"bfloat16[4,8]", "key<fry>[4]"}
    )
    assert crossing["F1B1", 0] == Counter(
        ["float32[4,8]", "float32[4,4]", "complex64[4,4]", "bfloat16[4,8]"]
    )


@pytest.mark.mpi(ranks=4)
def test_skip_connections_and_batch_leaves_of_two_stages():
    built, _ = trains_like_plain_jax(_case(Skipping(), 3))
    # The mask and the complex numbers are made of what crosses anyway; integers have no gradient.
    assert _crossing(built) == {
        ("F0", 1): Counter(["float32[4,8]"]),
        ("F1", 2): Counter(["float32[4,8]"]),
        ("F2B2", 1): Counter(["float32[4,8]", "complex64[4,8]"]),
        ("B1", 0): Counter(["float32[4,8]"]),
    }


def test_a_mask_on_every_stage_does_not_cross():
    built, _ = trains_like_plain_jax(_case(Masked(), 3))
    values = [value for crossing in _crossing(built).values() for value in crossing]
    assert set(values) == {"float32[4,16]"}


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_stage_without_parameters(empty):
    built, _ = trains_like_plain_jax(_case(Passing(empty), 3))
    # Nothing needs the gradient of the batch.
    assert ("B1", 0) in _crossing(built) or empty == 0


@pytest.mark.mpi(ranks=2)
def test_nothing_goes_back_where_the_gradient_stops():
    built, _ = trains_like_plain_jax(_case(Passing(stopped=True), 3))
    assert plans.loop_tasks(built.step_fn) == ["B1", "F0", "F1", "FB2"]
    assert set(_crossing(built)) == {("F0", 1), ("F1", 2), ("F2B2", 1)}
