"""16-bit numbers cross as they are, and what is added up is added up in 32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from support import cases, oracle, plans, ranks
from support.agreement import trains_like_plain_jax

from multimesh.jax import fetch
from multimesh.jax.flax import parallelize_eval

pytestmark = pytest.mark.mpi(ranks=2)

HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


class HalfMlp(nn.Module):
    """Layers that compute in `dtype` with parameters in `param_dtype`.

    Attributes:
      widened: Whether float32 lies between the layers: a cast that belongs to no layer.
    """

    dtype: jnp.dtype
    param_dtype: jnp.dtype = jnp.float32
    widened: bool = False

    @nn.compact
    def __call__(self, batch):
        x = batch["inputs"]
        for i in range(2):
            x = nn.Dense(
                16,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=nn.initializers.xavier_uniform(),
                name=f"layer_{i}",
            )(x)
            x = x.astype(jnp.float32) if self.widened else jnp.tanh(x)
        return x.astype(jnp.float32)


def _case(model, optimizer=None):
    return replace(
        cases.mlp([1, 1]), model=model, optimizer=optimizer or optax.adam(1e-2, eps=1e-3)
    )


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_crosses_bit_for_bit(dtype):
    def forward(params, batch):
        with jax.named_scope("layer_0"):
            x = jax.lax.bitcast_convert_type(batch, HALF[dtype])
        with jax.named_scope("layer_1"):
            return jax.lax.bitcast_convert_type(x, jnp.uint16)

    _, state, mesh = cases.build(cases.echo([4, 4]), cases.apart(2), 4)
    # Every number that there is, NaNs and subnormal ones among them.
    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    evaluate = parallelize_eval(forward, state, mesh, global_batch=every, num_microbatches=2)
    assert plans.loop_crossings(evaluate) == {("F0", 1): [f"{dtype}[128,256]"]}
    np.testing.assert_array_equal(evaluate(state, every), every)


def _train(case, layout, microbatches=2):
    step_fn, state, _ = cases.build(case, layout, 8, microbatches)
    return step_fn, oracle.train_pipeline(step_fn, state, case.batches(8, 3))


def _assert_near(got, expected):
    """Equal to what 8 bits of mantissa can tell, after a few steps."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.float32(ours), np.float32(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0.03, atol=0.03 * np.abs(theirs).max())


def _scaled_loss(model, params, batch):
    logits = model.apply(params, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return 1024 * losses.mean()


@pytest.mark.parametrize(
    ("dtype", "widened"), [("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_training_in_half_precision(dtype, widened):
    optimizer = optax.chain(optax.scale(1 / 1024), optax.adam(1e-2, eps=1e-3))
    case = replace(_case(HalfMlp(HALF[dtype], widened=widened), optimizer), loss=_scaled_loss)
    step_fn, over_mpi = _train(case, cases.apart(2))
    # A cast between the modules is on the receiving side, in both directions.
    crossing = [f"{dtype}[4,16]"]
    assert plans.loop_crossings(step_fn) == {("F0", 1): crossing, ("F1B1", 0): crossing}
    assert plans.accumulators(step_fn) == {"float32"}
    for leaf in jax.tree.leaves(over_mpi.state["params"]):
        assert leaf.dtype == np.float32

    # The same tasks on two devices of one rank: not a bit may differ.
    _, within_a_rank = _train(case, cases.Layout(((0,), (1,)), (1, 1)))
    for ours, theirs in zip(*map(_leaves, (over_mpi, within_a_rank)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    plain = ranks.computed_once(oracle.train, case, case.batches(8, 3))
    _assert_near(_leaves(over_mpi), _leaves(plain))


def _leaves(training):
    return jax.tree.leaves((training.outputs, training.state["params"]))


def _with_masters(inner):
    """An optimizer of 16-bit parameters that keeps them in 32 bits, and updates those."""

    def init(params):
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return masters, inner.init(masters)

    def update(gradients, state, params):
        masters, inner_state = state
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, inner_state = inner.update(gradients, inner_state, masters)
        masters = optax.apply_updates(masters, updates)
        updates = jax.tree.map(lambda m, p: m - p.astype(jnp.float32), masters, params)
        return updates, (masters, inner_state)

    return optax.GradientTransformation(init, update)


def test_half_precision_parameters_with_master_copies():
    model = HalfMlp(jnp.bfloat16, jnp.bfloat16)
    case = _case(model, _with_masters(optax.adam(1e-3, eps=1e-3)))
    step_fn, training = _train(case, cases.apart(2), 4)
    assert plans.accumulators(step_fn) == {"float32"}
    masters, _ = training.live.opt_state
    for master, param in zip(*map(jax.tree.leaves, (masters, training.live.params)), strict=True):
        assert (master.dtype, param.dtype) == (jnp.float32, jnp.bfloat16)
        assert master.sharding == param.sharding
        master, param = fetch((master, param))
        np.testing.assert_array_equal(master.astype(param.dtype), param)
    plain = ranks.computed_once(oracle.train, case, case.batches(8, 3))
    _assert_near(_leaves(training), _leaves(plain))


class WithScale(nn.Module):
    """A model with its loss scale among the parameters, where the loss and the optimizer see it."""

    @nn.compact
    def __call__(self, batch):
        self.param("loss_scale", nn.initializers.constant(1024.0), ())
        return HalfMlp(jnp.float32, name="mlp")(batch)


def _dynamically_scaled_loss(model, params, batch):
    scale = jax.lax.stop_gradient(params["params"]["loss_scale"])
    return _scaled_loss(model, params, batch) / 1024 * scale


def _dynamic_scaling(inner):
    """Skips a step that overflows and halves the loss scale; doubles it after every other step."""

    def update(gradients, state, params):
        scale = params["params"]["loss_scale"]
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
        updates, new_state = inner.update(gradients, state, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        updates["params"]["loss_scale"] = jnp.where(finite, scale, -scale / 2)
        return updates, jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.mpi(ranks=1)
def test_dynamic_loss_scaling():
    optimizer = _dynamic_scaling(optax.adam(1e-2, eps=1e-3))
    case = replace(_case(WithScale(), optimizer), loss=_dynamically_scaled_loss)
    batches = case.batches(8, 4)
    batches[1]["inputs"][5, 3] = np.inf
    _, training = trains_like_plain_jax(case, batches=batches)
    assert training.state["params"]["params"]["loss_scale"] == 1024 * 2 / 2 * 2 * 2
