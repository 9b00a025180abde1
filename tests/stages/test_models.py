"""Every model is cut into the fewest tasks, keeps its state in place, and trains like plain JAX."""

import re

import jax
import pytest
from flax import linen as nn
from support import cases, oracle, plans

ROWS, MICROBATCHES, STEPS = 16, 4, 3


# Four-stage transformers take the compiler half a minute; other cases have four stages too.
LARGE = ("transformer_4", "encoder_decoder_4")
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in cases.CASES
]


@pytest.fixture(scope="module", params=NAMES)
def built(request):
    """(case, layout, step_fn, initial state) of each model in turn."""
    case = cases.CASES[request.param]
    layout = cases.wide(case.stage_count)
    step_fn, state, _ = cases.build(case, layout, ROWS, MICROBATCHES, donate=False)
    return case, layout, step_fn, state


def _names(path):
    """Words of a tree path: `.params['params']['layer_0']` has params and layer_0."""
    return re.findall(r"\w+", jax.tree_util.keystr(path))


def _state_leaves(state):
    return jax.tree_util.tree_leaves_with_path(nn.unbox((state.params, state.opt_state)))


def test_one_microbatch_is_the_fewest_tasks(built):
    case, _, step_fn, _ = built
    assert plans.loop_tasks(step_fn) == sorted(case.loop)
    if case.name == "transformer_2":
        assert plans.task_names(step_fn) == ["B0", "F0", "F1B1"]


def test_update_is_the_fewest_rounds(built):
    case, _, step_fn, _ = built
    rounds = plans.update_rounds(step_fn)
    assert max(rounds.values()) <= case.update_rounds, rounds


def test_only_tied_parameters_cross_and_never_in_the_loop(built):
    case, _, step_fn, state = built
    parameters = {_sizes(leaf.shape) for leaf in jax.tree.leaves(nn.unbox(state.params))}
    assert not parameters.intersection(map(_sizes, plans.loop_values(step_fn)))
    crossing = [shape for shape in plans.moved_values(step_fn) if _sizes(shape) in parameters]
    # A tied parameter goes to its second reader once a step, and its gradient comes back once.
    tied = [case.tied] * 2 if case.tied else []
    assert list(map(_sizes, crossing)) == list(map(_sizes, tied))


def _sizes(shape):
    """The shape up to transposition."""
    return tuple(sorted(shape))


def test_state_lives_with_its_stage(built):
    case, layout, _, state = built
    owners = dict(case.unregistered) | dict(case.stages)
    for path, leaf in _state_leaves(state):
        owner = {owners[name] for name in _names(path) if name in owners}
        if owner:
            assert plans.devices_of(leaf) == set(layout.devices[owner.pop()]), path
        else:
            # Step counters and the like are on every device.
            assert leaf.ndim == 0 and plans.devices_of(leaf) == set(range(8)), path


def test_trains_like_plain_jax(built):
    case, _, step_fn, state = built
    batches = case.batches(ROWS, STEPS)
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, oracle.train(case, batches))
