"""`task`, the second form of `register_task`, constraints and `mjit`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.functions import Pair, agrees, batch, positions, row, same

import multimesh.jax.flax
from multimesh.errors import RegistryError, UsageError
from multimesh.jax import (
    Task,
    microbatch,
    mjit,
    parallelize,
    register_task,
    task,
    with_sharding_constraint,
)
from multimesh.jax.flax import parallelize_step, shard_axes

pytestmark = [pytest.mark.mpi(ranks=(1, 2)), pytest.mark.usefixtures("no_tasks")]


def both(params, x, first, second):
    return second(params["b"], first(params["a"], x))


class Product:
    """A callable class."""

    def __init__(self, function):
        self.function = function

    def __call__(self, w, x):
        return self.function(x @ w)


KINDS = {
    "functions": lambda: (
        task(lambda w, x: jnp.tanh(x @ w), devices=[0, 1]),
        task(lambda w, h: h @ w, devices=[2, 3]),
    ),
    "a class": lambda: (
        task(Product, mesh=row(0, 2))(jnp.tanh),
        task(Product, mesh=row(2, 2))(lambda h: h),
    ),
    "objects": lambda: (
        task(Product(jnp.tanh), mesh=row(0, 2)),
        task(Product(lambda h: h), mesh=row(2, 2)),
    ),
    "meshes of JAX": lambda: (
        task(Product(jnp.tanh), mesh=Mesh(np.array(jax.devices()[:2]), ("x",))),
        task(Product(lambda h: h), mesh=Mesh(np.array(jax.devices()[2:4]), ("x",))),
    ),
    "a mesh and devices": lambda: (
        task(Product(jnp.tanh), mesh=row(6, 2), devices=[0, 1]),
        task(Product(lambda h: h), mesh=row(6, 2), devices=jax.devices()[2:4]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_a_task(kind):
    first, second = KINDS[kind]()
    params = Pair.init(None, jax.random.key(0))

    def loss(params, x):
        return (both(params, x, first, second) ** 2).mean()

    _, (_, gradients) = agrees(jax.value_and_grad(loss), params, batch())
    assert [positions(gradients[name]) for name in "ab"] == [[0, 1], [2, 3]]


def test_an_array_of_devices_is_the_mesh():
    grid = np.array(jax.devices()).reshape(2, 4)

    @lambda fun: task(fun, "grid", devices=grid, device_axes=("data", "model"))
    def fun(w, x):
        return with_sharding_constraint(
            x @ with_sharding_constraint(w, P(None, "model")), P("data")
        )

    _, init = parallelize(fun, initial_batch=batch())
    w = init(batch(8))
    assert w.sharding.spec == P(None, "model")
    assert w.sharding.mesh.shape == {"data": 2, "model": 4}
    agrees(fun, batch(8), batch())


def test_logical_axes_of_a_task():
    @lambda fun: task(fun, mesh=row(0, 4, "x"), logical_axes={"hidden": "x"})
    def fun(w, x):
        return x @ with_sharding_constraint(w, P(None, "hidden"))

    _, init = parallelize(fun, initial_batch=batch())
    assert init(batch(8)).sharding.spec == P(None, "x")
    agrees(fun, batch(8), batch())


@pytest.mark.mpi(ranks=1)
def test_tasks_that_make_no_sense():
    def refused(words, error=RegistryError, fun=lambda x: x, **options):
        with pytest.raises(error, match=words):
            task(fun, "name", **options)

    refused("Got neither")
    refused("sizes and names of its axes already", mesh=row(0, 2), device_axes=("x",))
    refused("as many devices as its mesh has: 2. Got 4", mesh=row(0, 2), devices=range(4))
    refused("that of a submesh of sizes \\(2,\\)", mesh=row(0, 2), devices=[0, 1, 2])
    refused("must name each axis", devices=np.arange(4).reshape(2, 2))
    refused("must name each axis", devices=[0, 1], device_axes=("x", "y"))
    refused("must be positions", devices=["cpu:0"])
    refused("must be a TaskMesh", mesh=[0, 1])
    refused("more than once", devices=[0, 0])
    refused("maps 'a' to 'z'", devices=[0], logical_axes={"a": "z"})
    refused("needs a function", UsageError, fun=3, devices=[0])
    refused("whose instances can be called", UsageError, fun=int, devices=[0])
    refused(r"as texts\. Got \(3,\)", devices=[0], device_axes=(3,))
    refused(r"must be names of axes, as texts\. Got 3", devices=[0], device_axes=3)
    refused("must be a dict or pairs.*Got 3", devices=[0], logical_axes=3)
    with pytest.raises(RegistryError, match=r"must be a text\. Got 3"):
        task(jnp.sin, 3, devices=[0])


class Net(nn.Module):
    """Two layers, each a task."""

    def setup(self):
        wrap = multimesh.jax.flax.task
        self.a = wrap(nn.Dense, mesh=row(0, 2))(16)
        self.b = wrap(nn.Dense, mesh=row(4, 2))(features=4)

    def __call__(self, x):
        return self.b(nn.relu(self.a(x)))


@pytest.mark.mpi(ranks=1)
def test_a_flax_module_stays_one():
    wrapped = multimesh.jax.flax.task(nn.Dense, mesh=row(0, 2))(features=4)
    x = batch()
    params = wrapped.init(jax.random.key(0), x)
    same(params, nn.Dense(4).init(jax.random.key(0), x))
    same(wrapped.apply(params, x), nn.Dense(4).apply(params, x))
    assert "Dense" in wrapped.tabulate(jax.random.key(0), x)
    instance = multimesh.jax.flax.task(nn.Dense(4, name="dense"), mesh=row(0, 2))
    same(instance.apply(params, x), nn.Dense(4).apply(params, x))
    assert instance.name == "dense"
    with pytest.raises(UsageError, match="This Dense is a task already"):
        multimesh.jax.flax.task(instance, devices=[4])
    layer = multimesh.jax.flax.task(nnx.Linear, mesh=row(0, 2))(8, 4, rngs=nnx.Rngs(0))
    same(layer(x), nnx.Linear(8, 4, rngs=nnx.Rngs(0))(x))
    with pytest.raises(UsageError, match=r"Use multimesh\.jax\.flax\.task"):
        task(nn.Dense(4), mesh=row(0, 2))


class Compact(nn.Module):
    """The same, of modules made where they are called."""

    @nn.compact
    def __call__(self, x):
        wrap = multimesh.jax.flax.task
        x = nn.relu(wrap(nn.Dense(16, name="a"), mesh=row(0, 2))(x))
        return wrap(nn.Dense(4, name="b"), mesh=row(4, 2))(x)


class NnxNet(nnx.Module):
    """The same for NNX, with a class and an object."""

    def __init__(self, rngs):
        wrap = multimesh.jax.flax.task
        self.a = wrap(nnx.Linear, mesh=row(0, 2))(8, 16, rngs=rngs)
        self.b = wrap(nnx.Linear(16, 4, rngs=rngs), mesh=row(4, 2))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def test_nnx_modules_that_are_tasks_train():
    def loss_fn(model, x):
        return (model(x) ** 2).mean()

    step_fn, state, _ = parallelize_step(
        lambda rngs: NnxNet(rngs), optax.sgd(0.1), loss_fn=loss_fn, global_batch=batch(16)
    )
    model = NnxNet(nnx.Rngs(jax.random.key(42)))
    same(state.params, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert positions(state.params["a"]["kernel"]) == [0, 1]
    assert positions(state.params["b"]["kernel"]) == [4, 5]
    loss, state = step_fn(state, batch(16))
    value, gradients = nnx.value_and_grad(loss_fn)(model, batch(16))
    same(loss, value)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.to_pure_dict(gradients))
    same(state.params, expected)


@pytest.mark.parametrize("model", [Net, Compact])
def test_flax_modules_that_are_tasks_train(model):
    Net = model

    def loss_fn(params, x):
        return (Net().apply(params, x) ** 2).mean()

    step_fn, state, _ = parallelize_step(
        Net(), optax.sgd(0.1), loss_fn=loss_fn, global_batch=batch(16), num_microbatches=2,
        reduction="mean",
    )  # fmt: skip
    params = Net().init(jax.random.key(42), batch(16))
    same(state.params, params)
    kernels = state.params["params"]
    assert positions(kernels["a"]["kernel"]) == [0, 1]
    assert positions(kernels["b"]["kernel"]) == [4, 5]
    for _ in range(2):
        loss, state = step_fn(state, batch(16))
        value, gradients = jax.value_and_grad(loss_fn)(params, batch(16))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        same((loss, state.params), (value, params))


def test_an_initializer_with_named_axes():
    model = nn.Dense(8, kernel_init=shard_axes("data", "model"))
    register_task(
        "Dense_0|Dense", devices=np.arange(8).reshape(2, 4), device_axes=("data", "model")
    )

    def loss_fn(params, x):
        return (model.apply(params, x) ** 2).mean()

    _, state, _ = parallelize_step(model, optax.sgd(0.1), loss_fn=loss_fn, global_batch=batch(16))
    kernel = state.params["params"]["kernel"].value
    assert kernel.sharding.spec == P("data", "model")
    plain = nn.Dense(8, kernel_init=nn.initializers.xavier_normal())
    same(kernel, plain.init(jax.random.key(42), batch(16))["params"]["kernel"])


def layers(count):
    def fun(params, x):
        for index in range(count):
            with jax.named_scope(f"layer_{index}"):
                x = jnp.tanh(x @ params[index])
        return x

    return fun, [batch(8, seed) for seed in range(count)]


REGISTRATIONS = {
    "devices": ({"devices": [3]}, [[3], [3], [3], [3]]),
    "dims": (
        {"devices": range(4), "dims": (2, 2), "device_axes": ("x", "y"), "name": "all"},
        [[0, 1, 2, 3]] * 4,
    ),
    "rotation": (
        {"mesh": row(0, 2), "devices": range(2, 6)},
        [[2, 3], [4, 5], [2, 3], [4, 5]],
    ),
    "rotation of dims": ({"devices": range(3), "dims": (1,)}, [[0], [1], [2], [0]]),
    "positions": ({"callback": lambda name, _: [int(name), 4]}, [[0, 4], [1, 4], [2, 4], [3, 4]]),
    "a range with a color": (
        {"callback": lambda name, _: (range(0, 2), int(name) // 2)},
        [[0, 1]] * 4,
    ),
    "a pair with a color": (
        {"callback": lambda name, _: ((2, 6), "red"), "mesh": row(0, 4, "x")},
        [[2, 3, 4, 5]] * 4,
    ),
    "axes of a callback": (
        {"callback": lambda name, _: range(4), "device_axes": ("model",)},
        [[0, 1, 2, 3]] * 4,
    ),
    "a list with a color": (
        {"callback": lambda name, _: [[0, 2], "red"]},
        [[0, 1]] * 4,
    ),
    "devices with a color": (
        {"callback": lambda name, _: (jax.devices()[2:4], int(name) // 2)},
        [[2, 3]] * 4,
    ),
    "devices of a callback": (
        {"callback": lambda name, _: jax.devices()[int(name)]},
        [[0], [1], [2], [3]],
    ),
}


@pytest.mark.parametrize("how", REGISTRATIONS)
def test_the_second_form_of_register_task(how):
    options, places = REGISTRATIONS[how]
    register_task(r"layer_(\d)", **options)
    fun, params = layers(4)
    sharded, _ = agrees(fun, params, batch())
    lie = [positions(leaf) for leaf in parallelize(fun, initial_batch=batch())[1](params)]
    assert lie == places
    if "color" in how:  # programs of one submesh, kept apart by their colors
        colors = 1 if "pair" in how or "list" in how else 2
        assert len(sharded.plan.tasks) == colors


@pytest.mark.parametrize("pattern", ["up/layer_(0|1)|down/layer_(2|3)", "[^/]+/layer_.|never"])
def test_patterns_of_paths_with_alternatives(pattern):
    register_task(pattern, devices=[3])

    def fun(params, x):
        for index in range(4):
            half = "up" if index < 2 else "down"
            with jax.named_scope(half), jax.named_scope(f"layer_{index}"):
                x = jnp.tanh(x @ params[index])
        return x

    params = [batch(8, seed) for seed in range(4)]
    agrees(fun, params, batch())
    lie = parallelize(fun, initial_batch=batch())[1](params)
    assert [positions(leaf) for leaf in lie] == [[3]] * 4


@pytest.mark.mpi(ranks=1)
def test_names_rotate_in_the_order_of_the_program():
    register_task("query|key|value", mesh=row(0, 1), devices=range(3))

    def fun(params, x):
        parts = []
        for name in ("value", "key", "query"):
            with jax.named_scope(name):
                parts.append(x @ params[name])
        return parts

    params = {name: batch(8, seed) for seed, name in enumerate(("key", "query", "value"))}
    lie = parallelize(fun, initial_batch=batch())[1](params)
    assert {name: positions(leaf) for name, leaf in lie.items()} == {
        "value": [0],
        "key": [1],
        "query": [2],
    }


@pytest.mark.mpi(ranks=1)
def test_registrations_that_make_no_sense():
    def refused(words, **options):
        with pytest.raises(RegistryError, match=words):
            register_task("layer", **options)

    refused("exactly one of task= and callback=")
    refused("Got neither", name="x")
    refused("a Task says already what devices would", task=object(), devices=[0])
    refused("a callback says which devices", callback=print, devices=[0])
    refused("must be names of axes", callback=print, device_axes=3)
    refused("sizes and names", mesh=row(0, 2), dims=(2,))
    refused("positive sizes", devices=[0], dims=(0,))
    refused("several times that", devices=range(3), dims=(2,))
    refused("must be positions", devices=[[0, 1], [2]])
    with pytest.raises(RegistryError, match="must be a text"):
        register_task(re.compile("layer"), devices=[0])
    with pytest.raises(RegistryError, match="must be hashable"):
        Task(row(0, 2), color=[])


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize(
    ("words", "answer", "options"),
    [
        ("as many devices as its mesh has, 2", range(4), {"mesh": row(0, 2)}),
        ("leave out name=", Task(row(0, 2)), {"name": "x"}),
        ("must return a Task, or device positions", None, {}),
        ("must be positions", "0", {}),
        ("must name each axis", [[0, 1], [2, 3]], {}),
        ("must name each axis", ((0, 1), (2, 3)), {}),
    ],
)
def test_callbacks_that_return_what_cannot_be(words, answer, options):
    register_task("layer_0", callback=lambda name, backprop: answer, **options)
    fun, params = layers(1)
    sharded, _ = parallelize(fun, initial_batch=batch())
    with pytest.raises(RegistryError, match=words):
        sharded(params, batch())


def test_constraints_on_trees():
    @lambda fun: task(fun, mesh=row(0, 4))
    def fun(params, x):
        params = with_sharding_constraint(params, {"w": P("model"), "b": None})
        return (x @ params["w"] + params["b"]).sum()

    params = {"w": batch(8), "b": batch(1)[0]}
    lie = parallelize(fun, initial_batch=batch())[1](params)
    assert lie["w"].sharding.spec == P("model")
    assert lie["b"].sharding.spec == P()
    agrees(jax.value_and_grad(fun), params, batch())


@pytest.mark.mpi(ranks=1)
def test_constraints_outside_of_a_step():
    x = batch()
    assert with_sharding_constraint(x, P("batch", "model")) is x
    same(jax.jit(lambda x: with_sharding_constraint(x, P(("batch", "x"), None)) * 2)(x), 2 * x)
    with pytest.raises(UsageError, match="for 3 dimensions or more"):
        with_sharding_constraint(x, P(None, None, "model"))
    with jax.set_mesh(jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        split = jax.jit(lambda x: with_sharding_constraint(x, P("model", "batch")))(x)
    assert split.sharding.spec[0] == "model"


def test_jit_with_logical_names():
    @lambda fun: task(fun, mesh=row(0, 4))
    def fun(w, x):
        product = mjit(
            lambda w, x, power: (x @ w) ** power,
            in_shardings=(P(None, "model"), P("model")),
            out_shardings=P("model", None),
            static_argnums=2,
        )
        return product(w, x, 2)

    lie = parallelize(fun, initial_batch=batch())[1](batch(8))
    assert lie.sharding.spec == P(None, "model")
    agrees(fun, batch(8), batch())
    same(mjit(jnp.sin, in_shardings=P("model"))(batch()), np.sin(batch()))
    same(mjit(in_shardings=P("model"))(jnp.sin)(batch()), np.sin(batch()))


@pytest.mark.parametrize(
    "call",
    [
        lambda power, w, x: mjit(power, in_shardings=(P("model"), P()), static_argnums=2)(w, x),
        lambda power, w, x: mjit(power, in_shardings=P("model"), static_argnums=(2,))(w, x, 2),
        lambda power, w, x: mjit(power, in_shardings=P("model"), static_argnums=-1)(w, x, 2),
        lambda power, w, x: mjit(power, in_shardings=[P("model"), None], static_argnames="n")(
            w, x, 2
        ),
        lambda power, w, x: mjit(power, in_shardings=P("model"), static_argnames=["n"])(w, x, n=2),
        lambda power, w, x: mjit(power, in_shardings=P("model"))(w, x=x),
    ],
)  # fmt: skip
def test_static_arguments(call):
    def power(w, x, n=2):
        return (x @ w) ** n if n == 2 else None

    @lambda fun: task(fun, mesh=row(0, 4))
    def fun(w, x):
        return call(power, w, x)

    assert parallelize(fun, initial_batch=batch())[1](batch(8)).sharding.spec == P("model")
    agrees(fun, batch(8), batch())


@pytest.mark.mpi(ranks=1)
def test_shardings_that_are_none():
    def refused(words, call):
        with pytest.raises(UsageError, match=words):
            call()

    x = batch()
    refused("Got 'model'", lambda: with_sharding_constraint(x, "model"))
    refused("Got 'model'", lambda: with_sharding_constraint({"x": x}, {"x": "model"}))
    refused("prefix of the tree", lambda: with_sharding_constraint(x, (P("model"), None)))
    refused("Got 'model'", lambda: mjit(jnp.sin, in_shardings="model")(x))
    refused("1 in this call. Got 2", lambda: mjit(jnp.sin, in_shardings=(P(), P()))(x))
    refused("Got 3", lambda: microbatch(jnp.sin, 0, 4, arg_shardings=3)(x))
