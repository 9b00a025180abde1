"""Contexts change how a program is cut, and never its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import cases, oracle, ranks
from support.functions import Pair, agrees, batch, positions, row, same

from multimesh.errors import UsageError
from multimesh.jax import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    microbatch,
    only_fuse_loop_tasks,
    parallelize,
    register_task,
    task,
    tasks,
)
from multimesh.stages.registry import default_registry

pytestmark = [pytest.mark.mpi(ranks=(1, 2)), pytest.mark.usefixtures("no_tasks")]


def chain(devices):
    """Products one after another, each a task."""
    layers = [
        task(lambda w, x: jnp.tanh(x @ w), f"layer {index}", devices=[device])
        for index, device in enumerate(devices)
    ]

    def loss(params, x):
        for layer, w in zip(layers, params, strict=True):
            x = layer(w, x)
        return (x**2).mean()

    return loss, [batch(8, seed) for seed in range(len(devices))]


def names(sharded, section=None):
    return [task.name for task in sharded.plan.tasks if section in (None, task.section)]


@pytest.mark.parametrize("fusion", [True, False])
def test_task_fusion(fusion):
    loss, params = chain([0, 0, 5, 5])
    with enable_task_fusion(fusion):
        forward, _ = agrees(loss, params, batch())
        gradient, _ = agrees(jax.value_and_grad(loss), params, batch())
    assert len(names(forward)) == (2 if fusion else 4)
    # The backward pass of the last registered task joins its forward pass.
    assert len(names(gradient)) == (3 if fusion else 7)


def test_tasks_of_one_name_are_two():
    double, shift = task(lambda x: 2 * x, devices=[0]), task(lambda x: x + 1, devices=[0])
    with enable_task_fusion(False):
        sharded, _ = agrees(lambda w, x: shift(double(w * x)), np.float32(2), batch())
    assert len(names(sharded)) == 2


def test_fusion_in_the_loop_only():
    loss, params = chain([0, 5])
    tail = [task(lambda g: g * 2.0, f"tail {index}", devices=[0]) for index in range(2)]
    sliced = microbatch(jax.grad(loss), 0, 4, argnum=1)

    def fun(params, x):
        first, _ = sliced(params, x)
        return tail[1](tail[0](first))

    fused, _ = agrees(fun, params, batch())
    with only_fuse_loop_tasks():
        apart, _ = agrees(fun, params, batch())
    assert names(fused, "loop") == names(apart, "loop")
    assert len(names(apart, "after")) == len(names(fused, "after")) + 1


@pytest.mark.parametrize("recompute", [True, False])
def test_recomputation(recompute):
    params = [batch(8, seed) for seed in range(2)]

    def masked(params, x):
        mask = (x > 0).astype(jnp.float32)
        first = task(lambda w, m: (m @ w).sum(), "a", devices=[0])(params[0], mask)
        second = task(lambda w, m: (m @ w).sum(), "b", devices=[5])(params[1], mask)
        return first + second

    with enable_recomputation(recompute):
        sharded, _ = agrees(masked, params, batch())
    sent = [bundle for bundle in sharded.plan.bundles if bundle.task is not None]
    arrays = [var for bundle in sent for var in bundle.vars if var.aval.shape]
    assert bool(arrays) != recompute


def test_automatic_sharding():
    @lambda fun: task(fun, mesh=row(0, 4))
    def fun(params, x):
        return ((x @ params["w"] + params["b"]) * params["odd"]).mean()

    params = {"w": batch(8), "b": batch(1)[0], "odd": batch(1, width=3)[0, 0]}
    with autoshard():
        _, init, place = parallelize(fun, init_params=lambda: params, get_input_batch=batch)
        assert place().sharding.spec == P("model")
        _, init = parallelize(fun, initial_batch=batch())
        agrees(jax.value_and_grad(fun), params, batch())
    placed = init(params)
    specs = {name: leaf.sharding.spec for name, leaf in placed.items()}
    assert specs == {"w": P("model"), "b": P("model"), "odd": P()}


@pytest.mark.mpi(ranks=1)
def test_transforms_ignored():
    def init(key):
        return Pair.init(None, key)

    def fun(params, x):
        return x

    with ignore_transforms():
        assert parallelize(fun, init_params=init, get_input_batch=batch) == (fun, init, batch)
        plain, place = parallelize(fun, initial_batch=batch())
    assert plain is fun
    params = init(jax.random.key(0))
    assert place(params) is params


def test_a_step_with_transforms_ignored():
    case = cases.CASES["mlp"]
    with ignore_transforms():
        step_fn, state, _ = cases.build(case, cases.apart(case.stage_count), 16, 2)
    batches = case.batches(16, 2)
    assert {task.submesh for task in step_fn.plan.tasks} == {0}
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, ranks.computed_once(oracle.train, case, batches))


@pytest.mark.mpi(ranks=1)
def test_a_switch_without_a_meaning_says_so(caplog):
    with enable_fast_path():
        pass
    with enable_fast_path(False):
        pass
    assert [record.message.split(" has no")[0] for record in caplog.records] == [
        "enable_fast_path()"
    ]


def test_tasks_for_a_while():
    register_task("kept", devices=[0])

    def configure():
        register_task("first", devices=[1])
        register_task("second", devices=[5])

    def fun(params, x):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ params[0])
        with jax.named_scope("second"):
            return x @ params[1]

    params = [batch(8, 1), batch(8, 2)]
    with tasks(configure):
        sharded, init = parallelize(fun, initial_batch=batch())
    # They hold for what was built meanwhile, and only for that.
    assert [positions(leaf) for leaf in init(params)] == [[1], [5]]
    same(sharded(params, batch()), fun(params, batch()))
    assert [entry.pattern for entry in default_registry.entries] == ["kept"]
    register_task("first", devices=[2])
    with pytest.raises(UsageError, match="needs a function"), tasks(3):
        pass


def test_several_contexts():
    loss, params = chain([0, 0])
    with context(enable_task_fusion(False), autoshard(False)):
        sharded, _ = agrees(loss, params, batch())
    assert len(names(sharded)) == 2
    sharded, _ = agrees(loss, params, batch())
    assert len(names(sharded)) == 1


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize(
    "switch", [autoshard, enable_task_fusion, only_fuse_loop_tasks, enable_recomputation,
               enable_fast_path, ignore_transforms],
)  # fmt: skip
def test_switches_are_true_or_false(switch):
    with pytest.raises(UsageError, match=rf"{switch.__name__}\(\).*True or False\. Got 'no'"):
        switch("no")


def test_contexts_can_be_entered_again():
    loss, params = chain([0, 0])
    apart = context(enable_task_fusion(False), autoshard(False))

    @apart
    def build():
        return agrees(loss, params, batch())[0]

    assert [len(names(build())) for _ in range(2)] == [2, 2]
    with apart, apart:
        assert len(names(build())) == 2
    sharded, _ = agrees(loss, params, batch())
    assert len(names(sharded)) == 1
