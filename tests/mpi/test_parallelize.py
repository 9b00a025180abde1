"""`parallelize`: functions of parameters and a batch equal themselves in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.functions import Pair, agrees, aligned, batch, pair_on, positions, row, same

from multimesh.errors import RankMismatchError, UsageError
from multimesh.jax import (
    autoshard,
    parallelize,
    register_task,
    task,
    with_sharding_constraint,
)

pytestmark = [pytest.mark.mpi(ranks=(1, 2)), pytest.mark.usefixtures("no_tasks")]


@pytest.fixture(scope="module")
def pair():
    return pair_on(8)


def spec_of(array):
    return array.sharding.spec


def test_everything_lies_where_it_is_read(pair):
    sharded, init, get_batch = parallelize(
        pair.forward, init_params=pair.init, get_input_batch=lambda: batch()
    )
    params, x = init(jax.random.key(0)), get_batch()
    same(params, pair.params())
    assert (positions(params["a"]), spec_of(params["a"])) == ([0, 1, 2, 3], P("model", None))
    assert (positions(params["b"]), spec_of(params["b"])) == ([4, 5, 6, 7], P(None, "model"))
    assert positions(x) == [0, 1, 2, 3]
    result = sharded(params, x)
    assert positions(result) == [4, 5, 6, 7]
    same(result, pair.forward(pair.params(), batch()))


@pytest.mark.mpi(ranks=(1, 2, 4))
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["forward", "gradient"])
def test_on_any_number_of_devices(devices, kind):
    pair = pair_on(devices)
    fun = pair.forward if kind == "forward" else jax.value_and_grad(pair.loss)
    agrees(fun, pair.params(), batch(), devices=range(devices))


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_a_training_step(pair):
    sharded, init = parallelize(pair.train, init_params=pair.init_state, initial_batch=batch())
    state = init(jax.random.key(0))
    expected = pair.init_state(jax.random.key(0))
    same(state, expected)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    for seed in range(3):
        loss, state = sharded(state, batch(seed=seed))
        plain, expected = jax.jit(pair.train)(expected, batch(seed=seed))
        same((loss, state), (plain, expected), f"step {seed}")
        # So that nothing moves in the next step.
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == places
    assert positions(loss) == list(range(8))
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)


def test_a_batch_over_all_devices_is_brought_to_where_it_is_read(pair):
    mesh = Mesh(np.array(jax.devices()), ("all",))
    rows = batch(rows=16)
    everywhere = jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P("all")), lambda index: rows[index]
    )
    sharded, init = parallelize(pair.forward, init_params=pair.init, initial_batch=everywhere)
    params = init(jax.random.key(0))
    for _ in range(2):
        same(sharded(params, everywhere), pair.forward(pair.params(), rows))


def test_parameters_of_another_program_are_brought_to_their_place(pair):
    other = Pair(row(4, 4), row(0, 4))
    _, init = parallelize(pair.forward, init_params=pair.init, initial_batch=batch())
    sharded, _ = parallelize(other.forward, initial_batch=batch())
    params = init(jax.random.key(0))
    for _ in range(2):
        same(sharded(params, batch()), pair.forward(pair.params(), batch()))


def test_without_a_task_it_is_one_program_on_all_devices():
    def fun(params, x):
        return (x @ params["w"]).sum(axis=1), x.mean()

    sharded, got = agrees(fun, {"w": np.ones((8, 4), np.float32)}, batch())
    assert [task.name for task in sharded.plan.tasks] == ["F0"]
    assert positions(got[0]) == list(range(8))


def test_registered_tasks_are_found_by_name_scopes():
    register_task("(first|second)", callback=lambda name, _: [int(name == "second")])

    def fun(params, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ params["a"])
        with jax.named_scope("second"):
            return h @ params["b"]

    params = Pair.init(None, jax.random.key(0))
    sharded, got = agrees(fun, params, batch())
    assert [task.submesh for task in sharded.plan.tasks] == [0, 1]
    assert positions(got) == [1]


@pytest.mark.mpi(ranks=(1, 2, 4))
def test_what_jit_donates_is_donated(pair):
    sharded, init = parallelize(
        jax.jit(pair.train, donate_argnums=0), init_params=pair.init_state, initial_batch=batch()
    )
    state = init(jax.random.key(0))
    _, new = sharded(state, batch())
    expected = jax.jit(pair.train)(pair.init_state(jax.random.key(0)), batch())[1]
    same(new, expected)
    # A rank knows it of the parameters that it holds.
    held = [name for name in "ab" if state[0][name].sharding.addressable_devices]
    assert all(state[0][name].is_deleted() for name in held)
    with pytest.raises(UsageError, match=rf"params\[0\]\['{held[0]}'\] was donated"):
        sharded(state, batch())
    kept, init = parallelize(pair.train, init_params=pair.init_state, initial_batch=batch())
    state = init(jax.random.key(0))
    for _ in range(2):
        same(kept(state, batch())[1], expected)


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("kind", ["arrays of JAX", "arrays of NumPy"])
def test_arrays_of_the_caller_are_never_donated(devices, kind):
    pair = pair_on(devices)
    sharded, _ = parallelize(jax.jit(pair.train, donate_argnums=0), initial_batch=batch())
    state = pair.init_state(jax.random.key(0))
    expected = jax.jit(pair.train)(state, batch())[1]
    if kind == "arrays of NumPy":
        state = jax.tree.map(lambda leaf: aligned(np.asarray(leaf)), state)
    for _ in range(2):
        same(sharded(state, batch())[1], expected)


def test_a_batch_that_can_be_made_only_once(pair):
    rows = iter([batch(seed=seed) for seed in range(2)])
    sharded, init, get_batch = parallelize(
        pair.loss, init_params=pair.init, get_input_batch=lambda: next(rows)
    )
    params = init(jax.random.key(0))
    for seed in range(2):
        same(sharded(params, get_batch()), pair.loss(pair.params(), batch(seed=seed)))


def test_a_new_shape_is_planned_once(pair):
    sharded, init = parallelize(pair.loss, init_params=pair.init, initial_batch=batch())
    params = init(jax.random.key(0))
    sharded(params, batch())
    built = sharded.compile_count
    same(sharded(params, batch(rows=5)), pair.loss(pair.params(), batch(rows=5)))
    assert sharded.compile_count == 2 * built
    sharded(params, batch(rows=5))
    assert sharded.compile_count == 2 * built


def test_numbers_and_results_that_are_arguments(pair):
    def fun(params, x):
        return params["scale"] * x["x"], params["w"], 3.0, jnp.zeros((2, 2))

    agrees(fun, {"scale": 2.0, "w": batch(8)}, {"x": batch(), "unused": 1})


def test_arguments_of_the_functions_that_make_parameters_and_batches(pair):
    def init(key, x, hidden, scale=1.0):
        assert isinstance(hidden, int)
        return {"a": scale * jax.random.normal(key, (x.shape[1], hidden))}

    @lambda fun: task(fun, "only", devices=[5])
    def fun(params, x):
        return x @ params["a"]

    sharded, init_sharded, get_batch = parallelize(
        fun, init_params=init, get_input_batch=lambda seed: batch(seed=seed)
    )
    with pytest.raises(UsageError, match="call get_sharded_batch first"):
        init_sharded(jax.random.key(1), batch(), 4)
    x = get_batch(3)  # where it is read is not known yet
    params = init_sharded(jax.random.key(1), x, 4, scale=2.0)
    expected = init(jax.random.key(1), batch(seed=3), 4, scale=2.0)
    same(params, expected)
    assert positions(params["a"]) == positions(get_batch(4)) == [5]
    same(sharded(params, x), batch(seed=3) @ expected["a"])


def test_random_keys_among_the_arguments(pair):
    def fun(params, x):
        noise = jax.random.normal(x["key"], x["x"].shape)
        return pair.loss(params["w"], x["x"] + noise) + jax.random.uniform(params["key"])

    params = {"w": pair.params(), "key": jax.random.key(3)}
    agrees(fun, params, {"x": batch(), "key": jax.random.key(4)})


def test_arrays_of_random_keys():
    @lambda fun: task(fun, "noise", devices=[0, 1])
    def noise(keys, x):
        return x + jax.random.normal(keys[1], x.shape)

    def fun(params, x):
        return noise(x["keys"], x["x"] * params), x["keys"]

    x = {"x": batch(), "keys": jax.random.split(jax.random.key(4), 2)}
    sharded, (_, keys) = agrees(fun, np.float32(2), x)
    same(sharded(np.float32(2), x | {"keys": keys}), fun(np.float32(2), x))


def test_a_batch_that_is_none():
    sharded, init, place = parallelize(lambda params, _: params * 2)
    place(None)
    same(sharded(init(np.float32(3)), None), 6.0)


def test_a_call_makes_the_shapes_known(pair):
    sharded, init, place = parallelize(pair.loss)
    sharded(pair.params(), batch())
    params = init(pair.params())
    assert positions(params["a"]) == positions(place(batch())) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_numbers_are_weakly_typed_whatever_came_before(order):
    scaled = task(lambda w, x: w * x, "scaled", devices=[3])
    x = jnp.asarray(batch(), jnp.bfloat16)
    sharded, _ = parallelize(scaled, initial_batch=x)
    params = [3.0, np.float32(3)]
    for index in order:
        assert sharded(params[index], x).dtype == [jnp.bfloat16, jnp.float32][index]


def test_one_array_cannot_be_donated_twice(pair):
    def fun(params, x):
        return jax.tree.map(lambda leaf: 2 * leaf, params), [pair.loss(each, x) for each in params]

    sharded, init = parallelize(jax.jit(fun, donate_argnums=0), initial_batch=batch())
    first, second = init([pair.params(), pair.params()])
    with pytest.raises(UsageError, match=r"params\[0\].* and .*params\[1\].* are one array"):
        sharded([first, first], batch())
    same(sharded([first, second], batch()), fun([pair.params()] * 2, batch()))


def test_mistakes(pair):
    def refused(words, *args, **options):
        with pytest.raises(UsageError, match=words):
            parallelize(*args, **options)

    refused("needs a function", 3)
    refused("init_params must be a function", pair.loss, init_params=3)
    refused("Got both", pair.loss, get_input_batch=batch, initial_batch=batch())
    refused("different positions", pair.loss, devices=[0, 0])
    refused("different positions", pair.loss, devices=[8])
    refused("one device or more", pair.loss, devices=[])
    refused("must be positions", pair.loss, devices=["cpu"])
    sharded, place = parallelize(pair.loss, initial_batch=batch())
    with pytest.raises(UsageError, match=r"takes the parameters, and nothing else\. Got 2"):
        place(pair.params(), 3)
    with pytest.raises(UsageError, match=r"parallelize\(jax.value_and_grad\(fun\)\)"):
        jax.grad(sharded)(pair.params(), batch())
    with pytest.raises(UsageError, match=r"params\['a'\] must be an array or a number. Got str"):
        sharded({"a": "w", "b": 1.0}, batch())
    register_task("no_such_module", devices=[0])
    sharded, _ = parallelize(lambda w, x: x @ w, initial_batch=batch())
    with pytest.raises(UsageError, match="no_such_module"):
        sharded(batch(8), batch())


def test_a_pattern_that_matches_nothing_beside_tasks(pair, caplog):
    register_task("no_such_module", devices=[0])
    agrees(pair.loss, pair.params(), batch())
    assert "no scope of this function matches ['no_such_module']" in caplog.text


@pytest.mark.mpi(ranks=2)
def test_ranks_that_give_other_numbers(pair):
    rank = jax.process_index()
    sharded, init = parallelize(pair.loss, init_params=pair.init, initial_batch=batch())
    with pytest.raises(RankMismatchError, match="array 0 for init_params of rank 1 differs"):
        init(jax.random.key(rank))
    params = init(jax.random.key(0))
    with pytest.raises(RankMismatchError, match=r"batch of rank 1 differs.*seed random numbers"):
        sharded(params, batch(seed=rank))
    params = pair.params()
    params["b"] = params["b"] + rank
    with pytest.raises(RankMismatchError, match=r"params\['b'\] of rank 1 differs"):
        sharded(params, batch())


@pytest.mark.mpi(ranks=2)
def test_an_array_on_a_mesh_of_each_rank_alone(pair):
    mesh = Mesh(np.array(jax.local_devices()), ("x",))
    rows = jax.device_put(batch(), NamedSharding(mesh, P("x")))
    sharded, _ = parallelize(pair.loss, initial_batch=batch())
    with pytest.raises(RankMismatchError, match="place of batch of rank 1 differs"):
        sharded(pair.params(), rows)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("what", ["autoshard", "a constraint"])
def test_ranks_that_shard_otherwise(what):
    spec = P("model") if what == "a constraint" and jax.process_index() else P()

    @lambda fun: task(fun, "sharded", mesh=row(0, 8))
    def fun(w, x):
        return x @ with_sharding_constraint(w, spec) if what == "a constraint" else x @ w

    with autoshard(what == "autoshard" and jax.process_index() == 1):
        sharded, _ = parallelize(fun, initial_batch=batch())
    with pytest.raises(RankMismatchError):
        sharded(batch(8), batch())


@pytest.mark.mpi(ranks=2)
def test_ranks_that_give_other_shapes(pair):
    sharded, _ = parallelize(pair.loss, initial_batch=batch())
    with pytest.raises(RankMismatchError, match="shape of the batch of rank 1"):
        sharded(pair.params(), batch(rows=4 + jax.process_index()))
