"""Every way to make tasks, loops and constraints, on 1, 2, 4 and 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from support.functions import agrees, batch, halves, pair_on, positions, row, same

import multimesh.jax.flax
from multimesh.jax import (
    autoshard,
    context,
    enable_recomputation,
    enable_task_fusion,
    microbatch,
    mjit,
    only_fuse_loop_tasks,
    parallelize,
    register_task,
    task,
    tasks,
    with_sharding_constraint,
)
from multimesh.jax.flax import shard_axes

pytestmark = [pytest.mark.mpi(ranks=(1, 2)), pytest.mark.usefixtures("no_tasks")]

COUNTS = (1, 2, 4, 8)


def loss_of(forward):
    return lambda params, x: (forward(params, x) ** 2).mean()


def mixed_dtypes(count):
    """Floating-point numbers, small integers and flags cross together."""
    first, last = halves(count)

    def one(w, x):
        h = x @ w
        return h, (4 * h).astype(jnp.int8), h > 0

    def two(w, parts):
        h, steps, flags = parts
        return jnp.where(flags, h, h * steps.astype(jnp.float32)) @ w

    one, two = task(one, "one", devices=first), task(two, "two", devices=last)
    return lambda params, x: two(params["b"], one(params["a"], x))


def task_used_twice(count):
    first, last = halves(count)
    layer = task(lambda w, x: jnp.tanh(x @ w), "layer", devices=first)
    other = task(lambda w, x: x @ w, "other", devices=last)
    return lambda params, x: layer(params["a"], other(params["b"], layer(params["a"], x)))


def nested(count):
    first, last = halves(count)
    inner = task(lambda w, x: jnp.tanh(x @ w), "inner", devices=last)

    def outer(params, x):
        return 2.0 * inner(params["b"], x @ params["a"])

    return task(outer, "outer", devices=first)


def scan_inside(count):
    first, last = halves(count)

    def repeated(w, x):
        return jax.lax.scan(lambda h, _: (h + jnp.tanh(h @ w @ w.T), None), x, length=3)[0] @ w

    one, two = task(repeated, "one", devices=first), task(repeated, "two", devices=last)
    return lambda params, x: two(params["b"], one(params["a"], x))


def inside_a_scan(count):
    inside = task(lambda w, h: jnp.tanh(h @ w), "inside", devices=range(count))

    def forward(params, x):
        w = params["a"] @ params["b"]
        return jax.lax.scan(lambda h, _: (inside(w, h), None), x, length=3)[0]

    return forward


def rematerialized(count):
    forward = pair_on(count).forward
    return jax.checkpoint(forward, policy=jax.checkpoint_policies.dots_saveable)


def second_form(count):
    """Scopes that rotate over two submeshes."""
    register_task("layer_[ab]", mesh=row(0, max(1, count // 2)), devices=range(count))

    def forward(params, x):
        for name in "ab":
            with jax.named_scope(f"layer_{name}"):
                x = jnp.tanh(x @ with_sharding_constraint(params[name], P("model")))
        return x

    return forward


def logical_jit(count):
    def product(w, x):
        return mjit(lambda w, x: x @ w, in_shardings=(P(None, "model"), None))(w, x)

    first, last = (row(part.start, len(part)) for part in halves(count))
    one, two = task(product, "one", mesh=first), task(product, "two", mesh=last)
    return lambda params, x: two(params["b"], one(params["a"], x))


FORWARDS = {
    "two tasks": lambda count: pair_on(count).forward,
    "mixed dtypes": mixed_dtypes,
    "a task used twice": task_used_twice,
    "nested tasks": nested,
    "scans inside": scan_inside,
    "inside a scan": inside_a_scan,
    "rematerialization": rematerialized,
    "register_task's second form": second_form,
    "mjit": logical_jit,
}


def params(width=8, hidden=16):
    parts = np.random.default_rng(3)
    scale = 1 / np.sqrt(hidden)
    shapes = {"a": (width, hidden), "b": (hidden, width)}
    return {name: np.float32(scale * parts.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", FORWARDS)
def test_forward_and_gradient(kind, count):
    forward = FORWARDS[kind](count)
    agrees(forward, params(), batch(), devices=range(count))
    agrees(jax.value_and_grad(loss_of(forward)), params(), batch(), devices=range(count))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "wavefront", "custom"])
def test_microbatches(schedule, count):
    loss, devices = pair_on(count).loss, range(count)
    gradient, forward = jax.value_and_grad(loss), loss
    plain = microbatch(forward, 0, 3, argnum=1)
    if schedule != "custom":
        sliced = microbatch(gradient, 0, 3, argnum=1, schedule=schedule)
        plain = microbatch(forward, 0, 3, argnum=1, schedule=schedule)
    else:
        one = [["F0B0"] * 4] if count == 1 else [["F0", "B0"] * 4, ["F1B1"] * 4]
        sliced = microbatch(gradient, 0, 3, argnum=1, custom_schedule=one)
    sharded, got = agrees(sliced, params(), batch(), devices=devices)
    agrees(plain, params(), batch(), devices=devices)
    agrees(jax.grad(plain), params(), batch(), devices=devices)
    assert sharded.plan.cut.step.microbatches == 4
    parts = [gradient(params(), batch()[first : first + 3]) for first in range(0, 12, 3)]
    same(got, jax.tree.map(lambda *leaves: sum(leaves), *parts))


def configure(count):
    register_task("first", devices=halves(count)[0])
    register_task("second", devices=halves(count)[1])


CONTEXTS = {
    "autoshard": lambda count: autoshard(),
    "no fusion": lambda count: enable_task_fusion(False),
    "fusion in the loop only": lambda count: only_fuse_loop_tasks(),
    "no recomputation": lambda count: enable_recomputation(False),
    "tasks for a while": lambda count: tasks(lambda: configure(count)),
    "several": lambda count: context(
        autoshard(), enable_task_fusion(False), tasks(lambda: configure(count))
    ),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_contexts(kind, count):
    forward = pair_on(count).forward
    if "several" in kind or "while" in kind:

        def forward(params, x):
            with jax.named_scope("first"):
                x = jnp.tanh(x @ params["a"])
            with jax.named_scope("second"):
                return x @ params["b"]

    gradient = jax.value_and_grad(loss_of(forward))
    with CONTEXTS[kind](count):
        agrees(forward, params(), batch(), devices=range(count))
        agrees(gradient, params(), batch(), devices=range(count))
        agrees(microbatch(gradient, 0, 4, argnum=1), params(), batch(), devices=range(count))


@pytest.mark.parametrize("count", COUNTS)
def test_a_flax_module_with_named_axes(count):
    first, last = (row(part.start, len(part)) for part in halves(count))
    wrap = multimesh.jax.flax.task
    one = wrap(nn.Dense, "one", mesh=first)(16, kernel_init=shard_axes(None, "model"))
    two = wrap(nn.Dense, "two", mesh=last)(8, kernel_init=shard_axes("model", None))
    net = nn.Sequential([one, two])

    def loss(params, x):
        return (net.apply(params, x) ** 2).mean()

    plain = net.init(jax.random.key(0), batch())
    sharded, init = parallelize(
        jax.value_and_grad(loss),
        init_params=lambda: net.init(jax.random.key(0), batch()),
        initial_batch=batch(),
        devices=range(count),
    )
    placed = init()
    same(placed, plain)
    same(sharded(placed, batch()), jax.jit(jax.value_and_grad(loss))(plain, batch()))
    kernels = [leaf for leaf in jax.tree.leaves(placed) if leaf.ndim == 2]
    assert [kernel.sharding.spec for kernel in kernels] == [P(None, "model"), P("model", None)]
    assert [positions(kernel) for kernel in kernels] == [[*part] for part in halves(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_donated_or_kept(count):
    first = pair_on(count)
    for train in (first.train, jax.jit(first.train, donate_argnums=0)):
        sharded, init = parallelize(
            train, init_params=first.init_state, initial_batch=batch(), devices=range(count)
        )
        state, expected = init(jax.random.key(0)), first.init_state(jax.random.key(0))
        for seed in range(3):
            loss, state = sharded(state, batch(seed=seed))
            plain, expected = jax.jit(first.train)(expected, batch(seed=seed))
            same((loss, state), (plain, expected))
