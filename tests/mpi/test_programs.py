"""What functions may compute: tasks in every place, and what is around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from support.functions import HIDDEN, WIDTH, Pair, agrees, batch, positions, row, same

import multimesh.jax.flax
from multimesh.errors import PlacementError, UsageError
from multimesh.jax import (
    fetch,
    microbatch,
    parallelize,
    register_task,
    task,
    with_sharding_constraint,
)

pytestmark = [pytest.mark.mpi(ranks=(1, 2)), pytest.mark.usefixtures("no_tasks")]


@pytest.fixture(scope="module")
def pair():
    return Pair(row(0, 4), row(4, 4))


def test_a_task_used_twice():
    layer = task(lambda w, x: jnp.tanh(x @ w), "layer", mesh=row(0, 2))
    other = task(lambda w, x: x @ w, "other", devices=[2])

    def loss(params, x):
        return layer(params, other(params.T, layer(params, x))).mean()

    w = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    agrees(loss, w, batch())
    agrees(jax.value_and_grad(loss), w, batch())


LARGE = 64  # squared, as float32, more than may be computed on several submeshes


def embedded(params, x):
    """An embedding that the first and the last task read."""
    embed = task(lambda w, x: jnp.tanh(x @ w), "embed", devices=[0])
    head = task(lambda w, h: h @ w, "head", devices=[4])
    return head(params["emb"].T, embed(params["emb"], x)).mean()


def stacked(params, x):
    """Parameters in one array, a part of it for each task."""
    for index, device in enumerate((0, 4, 7)):
        x = task(lambda w, h: jnp.tanh(h @ w), f"layer {index}", devices=[device])(params[index], x)
    return x.mean()


def scaled(params, x):
    """A parameter of no task that two tasks' results are multiplied by."""
    one = task(lambda w, h: jnp.tanh(h @ w), "one", devices=[0])
    two = task(lambda w, h: jnp.tanh(h @ w), "two", devices=[4])
    return (two(params["b"], one(params["a"], x) @ params["scale"]) @ params["scale"]).mean()


SHARED = {
    "tied": (embedded, {"emb": batch(LARGE, 1, LARGE)}),
    "stacked": (stacked, np.stack([batch(LARGE, seed, LARGE) for seed in range(3)]) / 8),
    "scaled": (scaled, {name: batch(LARGE, len(name), LARGE) / 8 for name in ("a", "b", "scale")}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("sliced", [False, True])
def test_large_parameters_that_several_tasks_read(kind, sliced):
    loss, params = SHARED[kind]
    fun = jax.value_and_grad(loss)
    if sliced:
        fun = microbatch(fun, 0, 4, argnum=1)
    agrees(fun, params, batch(8, width=LARGE))


def test_an_optimizer_state_that_is_returned_apart(pair):
    def train(state, x):
        loss, (params, opt_state) = pair.train(state, x)
        return loss, params, opt_state

    sharded, init = parallelize(train, init_params=pair.init_state, initial_batch=batch())
    state = init(jax.random.key(0))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert positions(state[1][0].mu["a"]) == [0, 1, 2, 3]
    assert state[1][0].nu["b"].sharding.spec == P(None, "model")
    expected = pair.init_state(jax.random.key(0))
    for seed in range(2):
        _, *state = sharded(tuple(state), batch(seed=seed))
        expected = jax.jit(pair.train)(expected, batch(seed=seed))[1]
        same(tuple(state), expected)
        assert jax.tree.map(lambda leaf: leaf.sharding, tuple(state)) == places


def test_a_large_state_that_nothing_replaces():
    layer = task(lambda w, x: (x @ w).mean(), "layer", mesh=row(4, 2))

    def step(state, x):
        gradient = jax.grad(layer)(with_sharding_constraint(state["w"], P("model")), x)
        return state["w"] - state["rate"] * gradient

    state = {"w": batch(LARGE, 1, LARGE), "rate": batch(LARGE, 2, LARGE)}
    _, init = parallelize(step, initial_batch=batch(8, width=LARGE))
    assert positions(init(state)["rate"]) == [4, 5]
    agrees(step, state, batch(8, width=LARGE))


def test_gradients_of_one_program_are_taken_by_another(pair):
    gradients, init = parallelize(
        microbatch(jax.value_and_grad(pair.loss), 0, 3, argnum=1), initial_batch=batch()
    )
    params = init(pair.params())
    _, found = gradients(params, batch())
    places = [leaf.sharding for leaf in jax.tree.leaves(params)]
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == places

    def apply(params, gradients):
        pair.loss(params, batch())  # so that the tasks are known
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    sharded, _ = parallelize(apply, initial_batch=found)
    same(
        sharded(params, found), jax.tree.map(lambda p, g: p - 0.1 * g, pair.params(), fetch(found))
    )


def test_a_flag_of_the_forward_pass_in_an_update(pair):
    def train(params, x):
        loss, gradients = jax.value_and_grad(pair.loss)(params, x)
        ok = jnp.isfinite(loss).astype(jnp.float32)
        return loss, jax.tree.map(lambda p, g: p * (1 - 0.1 * ok) - 0.1 * g, params, gradients)

    sharded, _ = agrees(train, pair.params(), batch())
    moved = [var for bundle in sharded.plan.bundles for var in bundle.vars]
    assert (WIDTH, HIDDEN) not in [var.aval.shape for var in moved]


def test_values_are_printed_inside_of_tasks(capfd):
    @lambda fun: task(fun, "printing", devices=[0])
    def printing(w, x):
        jax.debug.print("the sum is {}", x.sum())
        return x @ w

    def loss(w, x):
        return printing(w, x).mean()

    agrees(jax.value_and_grad(loss), batch(8), np.ones((2, 8), np.float32))


@pytest.mark.parametrize("where", ["a task", "a named scope"])
def test_slices_inside_of_a_task(where):
    first = task(lambda w, x: jnp.tanh(x @ w), "first", devices=[0])

    def second(w, h):
        return (h @ w).sum()

    sliced = microbatch(second, 0, 4, argnum=1)
    if where == "a task":
        inside = task(sliced, "second", devices=[4])
    else:
        register_task("second", devices=[4])

        def inside(w, h):
            with jax.named_scope("second"):
                return sliced(w, h)

    def loss(params, x):
        return inside(params["b"], first(params["a"], x))

    params = {"a": batch(8, 1), "b": batch(8, 2)}
    _, init = parallelize(loss, initial_batch=batch())
    assert positions(init(params)["b"]) == [4]
    agrees(loss, params, batch())
    agrees(jax.grad(loss), params, batch())


def test_rows_of_a_batch_that_do_not_divide(pair):
    @lambda fun: task(fun, mesh=row(0, 4, "rows"))
    def fun(w, x):
        return with_sharding_constraint(x, P("rows")) @ w

    sharded, _ = agrees(fun, batch(8), batch(rows=8))
    same(sharded(batch(8), batch(rows=5)), batch(rows=5) @ batch(8))
    wrong = task(
        lambda w, x: x @ with_sharding_constraint(w, P(None, "rows")), mesh=row(0, 4, "rows")
    )
    sharded, _ = parallelize(lambda p, x: wrong(p["w"], x), initial_batch=batch())
    with pytest.raises(UsageError, match=r"\.params\['w'\].*does not divide"):
        sharded({"w": batch(8, width=6)}, batch())


def test_flax_logical_axes_of_a_task():
    partitioned = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, "mlp"))
    wrapped = multimesh.jax.flax.task(nn.Dense, mesh=row(0, 4), logical_axes={"mlp": "model"})
    model = wrapped(8, kernel_init=partitioned, use_bias=False)

    def fun(params, x):
        return model.apply(params, x)

    _, init = parallelize(
        fun, init_params=lambda key: model.init(key, batch()), initial_batch=batch()
    )
    kernel = jax.tree.leaves(init(jax.random.key(0)))[0]
    assert kernel.sharding.spec == P(None, "model")


def test_nested_tasks():
    inner = task(lambda w, x: jnp.tanh(x @ w), "inner", devices=[1])

    @lambda fun: task(fun, "outer", devices=[0])
    def outer(params, x):
        return inner(params["b"], x @ params["a"]) * 2.0

    def loss(params, x):
        return (outer(params, x) ** 2).mean()

    params = {"a": batch(8, 1), "b": batch(8, 2)}
    _, got = agrees(jax.value_and_grad(loss), params, batch())
    assert [positions(got[1][name]) for name in "ab"] == [[0], [1]]


def test_tasks_of_mixed_dtypes():
    narrow = task(lambda w, x: x.astype(jnp.bfloat16) @ w, "narrow", devices=[0, 1])
    wide = task(lambda w, h: h.astype(jnp.float32) @ w, "wide", devices=[2, 3])
    count = task(lambda n: n + 1, "count", devices=[4])

    def loss(params, x):
        hidden = narrow(params["a"], x["x"])
        return (wide(params["b"], hidden) ** 2).mean(), count(x["n"])

    w = np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)
    params = {"a": jnp.asarray(w, jnp.bfloat16), "b": w}
    x = {"x": batch(), "n": np.arange(3)}
    fun = jax.value_and_grad(loss, has_aux=True)
    ((value, counted), gradients) = fetch(parallelize(fun, initial_batch=x)[0](params, x))
    (plain, _), expected = jax.jit(fun)(params, x)
    assert gradients["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(counted, [1, 2, 3])
    # Bfloat16 has 8 bits: what is rounded after another sum may differ in the last.
    np.testing.assert_allclose(value, plain, rtol=1e-2)
    for name in "ab":
        got, like = (np.asarray(tree[name], np.float32) for tree in (gradients, expected))
        np.testing.assert_allclose(got, like, rtol=2e-2, atol=2e-2 * np.abs(like).max())


POLICIES = {
    name: getattr(jax.checkpoint_policies, name)
    for name in (
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    )
}
POLICIES |= {
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "save_any_names_but_these": jax.checkpoint_policies.save_any_names_but_these("other"),
    "save_anything_except_these_names": jax.checkpoint_policies.save_anything_except_these_names(
        "hidden"
    ),
    "save_from_both_policies": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
    ),
    "save_and_offload_only_these_names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_rematerialization_around_and_inside_tasks(policy, where):
    remat = functools.partial(jax.checkpoint, policy=POLICIES[policy])

    def first(w, x):
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden"))

    def second(w, h):
        return jnp.cos(h @ w)

    if where == "inside":
        first, second = remat(first), remat(second)
    first, second = task(first, "f", devices=[0, 1]), task(second, "s", devices=[4, 5])

    def forward(params, x):
        return second(params["b"], first(params["a"], x))

    if where == "around":
        forward = remat(forward)

    def loss(params, x):
        return (forward(params, x) ** 2).mean()

    agrees(jax.value_and_grad(loss), Pair.init(None, jax.random.key(0)), batch())


def test_parameters_of_no_task(pair):
    def loss(params, x):
        before = x * jnp.exp(params["before"])
        return (
            pair.loss(params["w"], before) * jnp.exp(params["after"]).sum() + params["w"]["a"].sum()
        )

    params = {"w": pair.params(), "before": batch(1)[0], "after": batch(1, seed=1)[0]}
    agrees(loss, params, batch())
    agrees(jax.value_and_grad(loss), params, batch())


@pytest.mark.parametrize("large", [False, True])
def test_a_loop_in_a_branch_that_is_not_taken_does_not_run(large, pair):
    def fun(params, x):
        loss = pair.loss(params, x)

        def halved(loss):
            return jax.lax.while_loop(lambda c: c >= 1, lambda c: c / 2, loss)

        return jax.lax.cond(jnp.isfinite(loss), halved, lambda loss: -jnp.ones_like(loss), loss)

    params = pair.params()
    agrees(fun, jax.tree.map(lambda leaf: leaf * np.inf, params) if large else params, batch())


@pytest.mark.parametrize("kind", [jax.custom_vjp, jax.custom_jvp])
def test_functions_with_derivatives_of_their_own_around_tasks(kind, pair):
    fun = kind(pair.loss)
    if kind is jax.custom_vjp:
        fun.defvjp(lambda p, x: jax.vjp(pair.loss, p, x), lambda residuals, g: residuals(g))
    else:
        fun.defjvp(lambda primals, tangents: jax.jvp(pair.loss, primals, tangents))
    agrees(fun, pair.params(), batch())
    agrees(jax.value_and_grad(fun), pair.params(), batch())
    agrees(microbatch(fun, 0, 4, argnum=1), pair.params(), batch())


@pytest.mark.parametrize("flag", [0, 1])
def test_conditions_inside_around_and_outside_of_tasks(flag, pair):
    def branch(w, x):
        return jax.lax.cond(x["flag"] > 0, lambda h: jnp.sin(h @ w), jnp.cos, x["x"])

    inside = task(branch, "branch", devices=[0, 1])

    def loss(params, x):
        h = inside(params["w"], x)
        h = jax.lax.cond(x["flag"] > 0, jnp.tanh, lambda h: h, h)  # of no task
        around = jax.lax.cond(
            x["flag"] > 0, lambda h: pair.loss(params["pair"], h), lambda h: h.mean(), h
        )
        return around

    params = {"w": batch(8), "pair": pair.params()}
    x = {"x": batch(), "flag": np.int32(flag)}
    agrees(loss, params, x)
    agrees(jax.value_and_grad(loss), params, x)


def test_a_scan_inside_a_task():
    def repeated(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]

    first = task(repeated, "repeated", devices=[0, 1])
    second = task(repeated, "again", devices=[2, 3])

    def loss(params, x):
        return (second(params["b"], first(params["a"], x)) ** 2).mean()

    agrees(jax.value_and_grad(loss), {"a": batch(8, 1), "b": batch(8, 2)}, batch())


def test_a_task_inside_a_scan():
    inside = task(lambda w, h: jnp.tanh(h @ w), "inside", devices=[1])

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, _: (inside(w, h), None), x, length=3)
        return (h**2).mean()

    agrees(jax.value_and_grad(loss), batch(8, 1), batch())


def test_tasks_of_two_submeshes_inside_a_scan():
    one = task(lambda w, h: jnp.tanh(h @ w), "one", devices=[0])
    two = task(lambda w, h: jnp.tanh(h @ w), "two", devices=[1])

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, _: (two(w, one(w, h)), None), x, length=3)
        return (h**2).mean()

    for fun in (loss, task(loss, "around", devices=[2])):
        sharded, _ = parallelize(fun, initial_batch=batch())
        with pytest.raises(PlacementError, match=r"`scan`.*one on devices \(0,\), two on"):
            sharded(batch(8, 1), batch())


def test_control_flow_between_an_outer_and_an_inner_task():
    inner = task(lambda w, h: jnp.tanh(h @ w), "inner", devices=[1])

    def scanned(w, x):
        return jax.lax.scan(lambda h, _: (inner(w, h), None), x, length=3)[0]

    def counted(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, h: inner(w, h), x)

    def rematerialized(w, x):
        return jax.checkpoint(lambda w, x: inner(w, x * 2))(w, x) + 1

    def branched(w, x):
        return jax.lax.cond(x.sum() > 0, lambda x: inner(w, x), lambda x: x, x)

    for body in (scanned, counted, rematerialized, branched):
        fun = task(body, "outer", devices=[0])
        sharded, _ = agrees(fun, batch(8, 1), batch())
        agrees(jax.grad(lambda w, x, fun=fun: (fun(w, x) ** 2).mean()), batch(8, 1), batch())
        assert (1,) in [place.task_mesh.devices for place in sharded.plan.cut.submeshes]
