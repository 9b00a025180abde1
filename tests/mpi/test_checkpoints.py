"""What is saved under one layout comes back under another, complete and bit for bit."""

import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from support import cases, oracle, ranks, sequential

from multimesh.checkpoint.handler import ShardHandler
from multimesh.errors import RankMismatchError, UsageError
from multimesh.jax import Task, clear_tasks, fetch, register_task
from multimesh.jax.checkpoint import Checkpoints
from multimesh.jax.flax import parallelize_step

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4))

ROWS = 8
KERNEL = ".params['params']['layer_1']['Dense_0']['kernel']"
TWO, FOUR, OTHER_MESH, CROSSWISE = (
    cases.wide(2),
    cases.apart(4),
    cases.wide(2, (2, 2)),
    cases.Layout(((1, 6), (0, 7)), (2, 1)),
)


@pytest.fixture
def folder():
    """A folder that all ranks see."""
    made = Path(ranks.computed_once(tempfile.mkdtemp))
    yield made
    ranks.everywhere(None)
    if jax.process_index() == 0:
        shutil.rmtree(made)


# ---------------------------------------------------------------- a state with every kind of leaf


def _noise(key):
    """A transformation whose state has a random key, and nodes without leaves."""

    def init(params):
        del params
        return {"key": key, "nothing": None, "empty": (), "count": jnp.zeros((), jnp.int32)}

    def update(updates, state, params=None):
        del params
        key, count = jax.random.fold_in(state["key"], 1), state["count"] + 1
        return updates, state | {"key": key, "count": count}

    return optax.GradientTransformation(init, update)


def build(layout, features=sequential.FEATURES):
    """Two layers with dropout and running statistics; one of them has bfloat16 parameters."""
    model = sequential.Layers(2, dropout=True, norm=True)

    def init(key, batch):
        variables = model.init({"params": key, "dropout": key}, batch["x"])
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables["params"]["layer_1"])
        return variables | {"params": variables["params"] | {"layer_1": half}}

    clear_tasks()
    meshes = layout.meshes()
    for index in range(2):
        mesh = meshes[index * (len(meshes) - 1)]
        register_task(f"layer_{index}", task=Task(mesh=mesh, logical_axes=cases.LOGICAL_AXES))
    return parallelize_step(
        model,
        optax.chain(_noise(jax.random.key(3)), optax.adam(1e-2)),
        loss_fn=functools.partial(sequential.loss_fn, model),
        init_fn=init,
        global_batch=sequential.make_batch(ROWS, 0),
        num_microbatches=2,
        reduction="mean",
        rngs={"dropout": jax.random.key(7)},
        mutable=["batch_stats"],
    )


def numbers(state):
    """Every leaf by its path, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(fetch(state))
    return {
        jax.tree_util.keystr(path): jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in leaves
    }


def is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def assert_identical(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(got[name], value, name)


def test_every_kind_of_leaf_in_other_layouts(folder):
    step_fn, state, _ = build(TWO)
    _, state = step_fn(state, sequential.make_batch(ROWS, 0))
    saved = numbers(state)
    assert saved[KERNEL].dtype == jnp.bfloat16
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"rows": ROWS})
        # It is still being written: neither may the step that takes the state over matter.
        _, state = step_fn(state, sequential.make_batch(ROWS, 1))
        assert checkpoints.latest() == 1
        for layout in (TWO, FOUR, CROSSWISE):
            step_fn, state, _ = build(layout)
            restored, extra = checkpoints.restore(state)
            assert extra == {"rows": ROWS}
            assert jax.tree.structure(restored) == jax.tree.structure(state)
            assert_identical(numbers(restored), saved)
            step_fn(restored, sequential.make_batch(ROWS, 1))
