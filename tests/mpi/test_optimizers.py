"""Optimizers that treat leaves apart, look at all of them, or hold back: as under plain JAX."""

import jax
import numpy as np
import optax
import pytest
from support import cases, plans, ranks
from support.agreement import trains_like_plain_jax

from multimesh.errors import PlacementError

pytestmark = pytest.mark.mpi(ranks=1)

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 2, 10)
# Adam divides by the gradient's size; eps keeps rounding in tiny gradients from mattering.
EPS = {"eps": 1e-3}


def _labels(label):
    """A function of parameters that labels each leaf by its path."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: label(jax.tree_util.keystr(path)), params
    )


def _average_of_params(decay):
    """Keeps a moving average of the parameters, which starts as the parameters themselves."""

    def update(updates, average, params):
        new = optax.apply_updates(params, updates)
        return updates, jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, new)

    return optax.GradientTransformation(lambda params: params, update)


def _check(optimizer, layers_per_stage=(1, 1), reduction="mean", **options):
    case = cases.mlp(list(layers_per_stage), reduction, optimizer)
    return trains_like_plain_jax(case, **options)


def _each_layer_its_own():
    optimizers = {
        "layer_0": optax.lamb(2e-2, **EPS),
        "layer_1": optax.lion(1e-2),
        "layer_2": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "layer_3": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, **EPS),
    }
    label = _labels(lambda path: next(name for name in optimizers if name in path))
    return optax.multi_transform(optimizers, label)


@pytest.mark.mpi(ranks=2)
def test_each_layer_its_own_optimizer():
    _, training = _check(_each_layer_its_own(), [2, 2])
    # State lives with its parameter, also where a mask hides the others.
    paths = jax.tree_util.tree_leaves_with_path(training.live.opt_state)
    for path, leaf in paths:
        name = jax.tree_util.keystr(path)
        for layer, device in enumerate((0, 0, 4, 4)):
            if f"['layer_{layer}']['Dense_0']" in name and leaf.ndim:
                assert plans.devices_of(leaf) == {device}, name
    held, whole = ranks.state_bytes(training.live)
    assert sum(ranks.everywhere(held)) == whole


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_stage(frozen):
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.masked(optax.add_decayed_weights(0.1), _labels(lambda path: "kernel" in path)),
        optax.multi_transform(
            {"train": optax.adam(SCHEDULE, **EPS), "freeze": optax.set_to_zero()},
            _labels(lambda path: "freeze" if f"layer_{frozen}" in path else "train"),
        ),
        optax.ema(0.9),
        _average_of_params(0.9),
    )
    _, training = _check(optimizer, [1, 1, 1])
    # Two moments, an average of updates and one of parameters; frozen ones have no moments.
    kernels = [leaf for leaf in jax.tree.leaves(training.live.opt_state) if leaf.ndim == 2]
    assert len(kernels) == 2 * 2 + 3 + 3


@pytest.mark.mpi(ranks=4)
def test_gradients_accumulated_over_steps_are_those_of_both_batches():
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE, **EPS))
    optimizer = optax.MultiSteps(inner, 2).gradient_transformation()
    _check(optimizer, reduction="weighted", steps=5)


def test_steps_that_are_not_finite_are_skipped():
    case = cases.mlp([1, 1])
    batches = case.batches(8, 4)
    batches[1]["inputs"][3, 2] = np.nan
    optimizer = optax.apply_if_finite(optax.adam(SCHEDULE, **EPS), 3)
    _, training = _check(optimizer, batches=batches)
    assert training.state["opt_state"].total_notfinite == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, **EPS),
        optax.contrib.prodigy(1.0, **EPS),
        optax.contrib.mechanize(optax.sgd(0.1)),
        optax.chain(optax.zero_nans(), optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, 1, accumulation_size=2)),
        optax.polyak_sgd(0.1),
    ],
    ids=["schedule_free", "prodigy", "mechanize", "clipped by unit", "plateau", "polyak"],
)
def test_other_optimizers(optimizer):
    _check(optimizer)


def test_one_vector_of_all_parameters_is_refused():
    case = cases.mlp([2, 2], optimizer=optax.flatten(optax.adam(1e-2)))
    with pytest.raises(
        PlacementError, match=r"gather float32\[256\].*leaf by leaf \(not optax.flatten\)"
    ):
        cases.build(case, cases.apart(2), 8, 2)
