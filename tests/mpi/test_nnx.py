"""NNX models in pipelines equal plain NNX: the model called on one microbatch after the other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from support import cases, nnx_models, oracle, ranks

from multimesh.errors import RankMismatchError, RegistryError, UsageError
from multimesh.jax import Task, clear_tasks, fetch, register_task
from multimesh.jax.flax import parallelize_eval, parallelize_step

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4))

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
STEPS = 3


def register(layout):
    clear_tasks()
    for index, mesh in enumerate(layout.meshes()):
        register_task(f"layers/{index}", task=Task(mesh, cases.LOGICAL_AXES))


def build(model, rows=8, microbatches=4, loss=nnx_models.mean_loss, **options):
    make_batch = nnx_models.tokens if loss is nnx_models.token_loss else nnx_models.noise
    if loss is nnx_models.mean_loss:
        options["reduction"] = "mean"
    return parallelize_step(
        model,
        OPTIMIZER,
        loss_fn=loss,
        global_batch=make_batch(rows, 0),
        num_microbatches=microbatches,
        **options,
    )


def plain(make, loss, sizes, batches):
    """The losses and the variables that plain NNX arrives at."""
    with oracle.one_device():
        model = make(nnx.Rngs(jax.random.key(42)))
        losses = nnx_models.train(model, OPTIMIZER, loss, sizes, batches)
    return losses, numbers(model)


def numbers(model):
    """All variables of a model as NumPy arrays, random keys as their data."""

    def number(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(number, nnx.to_pure_dict(nnx.state(model)))


def check(make, rows, microbatches, loss=nnx_models.mean_loss):
    """Trains in a pipeline and in plain NNX."""
    make_batch = nnx_models.tokens if loss is nnx_models.token_loss else nnx_models.noise
    step_fn, state, _ = build(make, rows, microbatches, loss)
    batches = [make_batch(rows, seed) for seed in range(STEPS)]
    losses = []
    for batch in batches:
        value, state = step_fn(state, batch)
        losses.append(np.asarray(value))
    expected = ranks.computed_once(plain, make, loss, step_fn.plan.sizes, batches)
    oracle.assert_tree_close(losses, expected[0], "loss")
    oracle.assert_tree_close(numbers(fetch(state).model()), expected[1], "model")
    return step_fn, state


TRANSFORMS = {
    "remat": partial(nnx_models.Mlp, layer=nnx_models.RematLayer),
    "jit": partial(nnx_models.Mlp, layer=nnx_models.JitLayer),
    "scan": nnx_models.Scanned,
}


def test_statistics_and_random_numbers():
    register(cases.apart(2))
    _, state = check(lambda rngs: nnx_models.Mlp(2, rngs=rngs), 10, 4)  # 3, 3, 2 and 2 rows
    for tree in (state.params, *state.collections.values()):
        for index, position in enumerate((0, 4)):
            for leaf in jax.tree.leaves(tree["layers"][index]):
                assert leaf.sharding.device_set == {jax.devices()[position]}


def test_a_shared_stream_does_not_hold_up_the_pipeline():
    register(cases.apart(2))
    step_fn, _ = check(lambda rngs: nnx_models.SharedStream(2, rngs=rngs), 8, 4)
    # No stage waits with a microbatch until another has done with the one before.
    carried = [edge for edge in step_fn.plan.graph.dependencies if edge.carried]
    assert all(edge.source == edge.target for edge in carried)


@pytest.mark.mpi(ranks=(4,))
def test_four_stages():
    register(cases.wide(4))
    check(lambda rngs: nnx_models.Mlp(4, rngs=rngs, dropout=False), 8, 4)


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.parametrize(("name", "microbatches"), [("remat", 2), ("jit", 1), ("scan", 2)])
def test_transforms_inside_a_stage(name, microbatches):
    register(cases.apart(2))
    check(lambda rngs: TRANSFORMS[name](2, rngs=rngs), 8, microbatches)


@pytest.mark.mpi(ranks=(4,))
def test_a_transformer_with_tied_embedding_and_logical_axes():
    first, last = cases.wide(2, (2, 2)).meshes()
    clear_tasks()
    for pattern, mesh in (("embed", first), (r"blocks/(\d)", last), ("head", last)):
        register_task(pattern, task=Task(mesh, cases.LOGICAL_AXES))
    _, state = check(lambda rngs: nnx_models.Transformer(1, rngs=rngs), 8, 2, nnx_models.token_loss)
    assert "table" not in state.params["head"]  # one leaf for both
    kernel = state.params["blocks"][0]["qkv"]["kernel"].sharding
    assert {jax.devices().index(device) for device in kernel.device_set} == {4, 5, 6, 7}
    assert kernel.spec == jax.sharding.PartitionSpec("x", "y")
    model = fetch(state).model()
    assert model.head.table is model.embed.embedding


class Mean(nnx.Variable):
    """A variable whose value is a tree."""


class OtherKinds(nnx.Module):
    """A Linen layer, and an average of what it returns."""

    def __init__(self, rngs):
        self.dense = nnx.bridge.ToNNX(nn.Dense(nnx_models.FEATURES), rngs=rngs)
        self.dense.lazy_init(jnp.zeros((1, nnx_models.FEATURES)))
        self.mean = Mean({"rows": jnp.zeros(()), "of": (jnp.zeros(nnx_models.FEATURES),)})

    def __call__(self, x):
        x, old = jnp.tanh(self.dense(x)), self.mean.get_value()
        self.mean.set_value({"rows": old["rows"] + len(x), "of": (old["of"][0] + x.sum(0),)})
        return x


class OtherLayers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([OtherKinds(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.mpi(ranks=(2,))
def test_linen_layers_and_variables_that_are_trees():
    register(cases.apart(2))
    _, state = check(lambda rngs: OtherLayers(rngs), 8, 4)
    for index, position in enumerate((0, 4)):
        for leaf in jax.tree.leaves(state.params["layers"][index]["dense"]):
            assert leaf.sharding.device_set == {jax.devices()[position]}


def test_an_instance_is_only_read():
    register(cases.apart(2))
    model = nnx_models.Mlp(2, nnx.Rngs(0), dropout=False)
    before = numbers(model)
    step_fn, state, _ = build(model, microbatches=1)
    oracle.assert_tree_close(numbers(fetch(state).model()), before, "state")
    step_fn(state, nnx_models.noise(8, 0))
    oracle.assert_tree_close(numbers(model), before, "model")
    assert nnx_models.Layer.__call__.__module__ == nnx_models.__name__
    assert not hasattr(nnx_models.Layer.__call__, "__wrapped__")


def test_evaluation_between_steps():
    register(cases.apart(2))
    step_fn, state, mesh = build(lambda rngs: nnx_models.Mlp(2, rngs=rngs, dropout=False))

    def predict(model, batch):
        model.eval()
        return model(batch["x"])

    evaluate = parallelize_eval(
        predict, state, mesh, global_batch=nnx_models.noise(6, 0), num_microbatches=2
    )
    for seed in range(2):
        batch = nnx_models.noise(6, seed)
        expected = predict(fetch(state).model(), batch)
        oracle.assert_close(evaluate(state, batch), np.asarray(expected))
        _, state = step_fn(state, nnx_models.noise(8, seed))
    # The model itself, by default: it must have the state's variables.
    model = fetch(state).model()
    model.eval()
    evaluate = parallelize_eval(model, state, mesh, global_batch=batch["x"])
    oracle.assert_close(evaluate(state, batch["x"]), np.asarray(model(batch["x"])))
    with pytest.raises(UsageError, match="variables"):
        parallelize_eval(
            nnx_models.Mlp(1, nnx.Rngs(0), dropout=False), state, mesh, global_batch=batch["x"]
        )
    for other in (lambda rngs: model, nn.Dense(3)):
        with pytest.raises(UsageError, match=r"\(model, batch\)"):
            parallelize_eval(other, state, mesh, global_batch=batch["x"])


class Twice(nnx.Module):
    """One layer in two places."""

    def __init__(self, rngs):
        layer = nnx_models.Layer(rngs)
        self.layers = nnx.List([layer, layer])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


class Assigns(nnx_models.Mlp):
    """What a function does to a model while it runs."""

    def __init__(self, what, rngs):
        super().__init__(2, rngs)
        self.count = nnx.BatchStat(jnp.zeros(()))
        self.what = what

    def __call__(self, x):
        if self.what == "param":
            self.layers[0].linear.kernel[...] *= 2
        elif self.what == "shape":
            self.count.set_value(jnp.zeros(3))
        else:
            self.extra = nnx.Cache(jnp.zeros(3))
        return super().__call__(x)


def _vector(model, batch):
    return (model(batch["x"]) - batch["y"]).mean(axis=0)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nnx_models.Mlp, {}, "Got <class"),
        (7, {}, "must be a Flax module instance"),
        (lambda rngs: 7, {}, "function that returns int"),
        (lambda rngs: nnx_models.Mlp(2, rngs), {"loss": _vector, "reduction": "mean"}, "scalar"),
        (lambda rngs: nnx_models.Mlp(2, rngs), {"mutable": ["BatchStat"]}, "leave it out"),
        (lambda rngs: nnx_models.Mlp(2, rngs), {"rngs": {"d": jax.random.key(0)}}, "leave it out"),
        (lambda rngs: nnx_models.Mlp(2, rngs), {"init_fn": lambda key, x: x}, "leave it out"),
        (Twice(nnx.Rngs(0)), {}, "layers/0 and at layers/1"),
        (Assigns("param", nnx.Rngs(0)), {}, "layers/0/linear/kernel"),
        (Assigns("shape", nnx.Rngs(0)), {}, "count"),
        (Assigns("new", nnx.Rngs(0)), {}, "extra"),
    ],
)
def test_what_is_no_model(model, options, message):
    register(cases.apart(2))
    with pytest.raises(UsageError, match=message):
        build(model, **options)


def test_patterns_and_instances_are_checked():
    register(cases.apart(3))
    with pytest.raises(RegistryError, match="layers/1/linear"):
        build(lambda rngs: nnx_models.Mlp(2, rngs=rngs))
    register(cases.apart(2))
    if jax.process_count() > 1:
        with pytest.raises(RankMismatchError, match="numbers of the model"):
            build(nnx_models.Mlp(2, nnx.Rngs(jax.process_index())))
