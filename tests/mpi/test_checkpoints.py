"""What is saved under one layout comes back under another, complete and bit for bit."""

import errno
import functools
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, oracle, ranks, sequential

from multimesh.checkpoint import handler, parts
from multimesh.errors import RankMismatchError, RestoreError, SaveError, UsageError
from multimesh.jax import Task, clear_tasks, fetch, register_task
from multimesh.jax.checkpoint import Checkpoints
from multimesh.jax.flax import parallelize_step
from multimesh.state import without_shards

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4))

ROWS = 8
KERNEL = ".params['params']['layer_1']['Dense_0']['kernel']"


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


def build(layout):
    """Two layers with running statistics; one of them has bfloat16 parameters."""
    model = sequential.Layers(2, norm=True)

    def init(key, batch):
        variables = model.init(key, batch["x"])
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables["params"]["layer_1"])
        return variables | {"params": variables["params"] | {"layer_1": half}}

    clear_tasks()
    for index, mesh in enumerate(layout.meshes()):
        register_task(f"layer_{index}", task=Task(mesh=mesh, logical_axes=cases.LOGICAL_AXES))
    return parallelize_step(
        model,
        optax.chain(_noise(jax.random.key(3)), optax.adam(1e-2)),
        loss_fn=functools.partial(sequential.loss_fn, model),
        init_fn=init,
        global_batch=sequential.make_batch(ROWS, 0),
        num_microbatches=2,
        reduction="mean",
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


def test_every_kind_of_leaf(folder):
    step_fn, state, _ = build(cases.wide(2))
    _, state = step_fn(state, sequential.make_batch(ROWS, 0))
    saved = numbers(state)
    assert saved[KERNEL].dtype == jnp.bfloat16
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"rows": ROWS})
        # It may still be being written: the step that takes the state over must not matter.
        _, state = step_fn(state, sequential.make_batch(ROWS, 1))
        restored, extra = checkpoints.restore(state)
    assert extra == {"rows": ROWS}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_identical(numbers(restored), saved)
    step_fn(restored, sequential.make_batch(ROWS, 1))


def test_training_goes_on_as_if_it_had_not_stopped(folder):
    case = cases.mlp([1, 1], optimizer=optax.adamw(1e-2, eps=1e-3))
    batches = case.batches(ROWS, 4)
    expected = ranks.computed_once(oracle.train, case, batches)
    step_fn, state, _ = cases.build(case, cases.wide(2), ROWS, 2)
    with Checkpoints(folder, asynchronous=False) as checkpoints:
        for step, batch in enumerate(batches):
            _, state = step_fn(state, batch)
            if step == 1:
                checkpoints.save(2, state)
        uninterrupted = numbers(state)
        state, _ = checkpoints.restore(state)
        for batch in batches[2:]:
            _, state = step_fn(state, batch)
        assert_identical(numbers(state), uninterrupted)
        step_fn, state, _ = cases.build(case, cases.wide(2, (2, 1), total=4), ROWS, 4)
        state, _ = checkpoints.restore(state)
        got = oracle.train_pipeline(step_fn, state, batches[2:])
    oracle.assert_tree_close(got.outputs, expected.outputs[2:], "outputs")
    oracle.assert_tree_close(got.state, expected.state, "state")


# ---------------------------------------------------------------- states made by hand


def place(value, devices, *spec, shape=(-1, 1)):
    """An array on some devices; without a shard on ranks that have none of them."""
    chosen = np.array(jax.devices())[list(devices)]
    sharding = NamedSharding(Mesh(chosen.reshape(shape), ("x", "y")), P(*spec))
    if not sharding.addressable_devices:
        return without_shards(value.shape, value.dtype, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def make_state(first=(0, 1, 2, 3), last=(4, 5, 6, 7), shape=(2, 2)):
    """A state on two submeshes, with leaves that are split, copied, and everywhere."""
    kernel = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "first": {
            "split": place(kernel, first, "x", "y", shape=shape),
            "copied": place(kernel + 100, first),
        },
        "last": {
            "rows": place(kernel + 200, last, "x", shape=shape),
            "half": place((kernel / 7).astype(jnp.bfloat16), last, "y", shape=shape),
            "keys": place(jax.random.split(jax.random.key(1), 8), last, "x", shape=shape),
        },
        "across": place(kernel + 400, range(8), ("x", "y")),
        "step": place(np.array(3, np.int32), range(8)),
    }


def test_every_leaf_is_written_once(folder):
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, state)
    assert [path.name for path in sorted(folder.iterdir())] == ["0"]
    written = [
        key
        for process in sorted((folder / "0" / "state").glob("ocdbt.process_*"))
        for key in tensorstore.KvStore.open(f"file://{process}/|ocdbt:").result().list().result()
    ]
    numbers_of = [key for key in written if not key.endswith(b".zarray")]
    assert len(numbers_of) == len(set(numbers_of))
    chunks = {"first.split": 4, "first.copied": 1, "last.rows": 2, "last.half": 2}
    chunks |= {"last.keys": 2, "across": 8, "step": 1}
    assert len(numbers_of) == sum(chunks.values())
    for name, count in chunks.items():
        assert sum(key.startswith(f"{name}/".encode()) for key in numbers_of) == count, name


@pytest.mark.parametrize(
    ("first", "last", "shape"),
    [((0,), (7,), (1, 1)), ((6, 7, 0, 1), (2, 3, 4, 5), (4, 1)), (range(8), range(8), (2, 4))],
    ids=["one device each", "crosswise", "all devices"],
)
def test_other_submeshes_and_shapes_of_mesh(folder, first, last, shape):
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, state)
        like = make_state(first, last, shape)
        restored, extra = checkpoints.restore(like)
    assert extra is None
    assert_identical(numbers(restored), numbers(state))
    wanted, got = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (like, restored))
    assert got == wanted


def test_another_model_is_refused_before_anything_is_read(folder, monkeypatch):
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, state)
        other = make_state() | {"more": state["step"]}
        del other["last"]["rows"]
        other["first"]["split"] = place(np.zeros((8, 4), np.float32), range(4))
        other["step"] = place(np.zeros((), np.uint32), range(8))

        async def read(*arguments):
            pytest.fail("something was read")

        monkeypatch.setattr(handler.ShardHandler, "deserialize", read)
        with pytest.raises(UsageError) as caught:
            checkpoints.restore(other)
    messages = ranks.everywhere(str(caught.value))
    assert len(set(messages)) == 1
    assert "The checkpoint lacks more. The state lacks last.rows." in messages[0]
    assert (
        "first.split (float32[8,8], not float32[8,4]), step (int32[], not uint32[])" in messages[0]
    )


def test_the_last_ones_are_kept(folder):
    state = make_state()
    with Checkpoints(folder / "made", keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 5):
            checkpoints.save(step, state | {"step": place(np.array(step), range(8))}, [step])
        assert checkpoints.latest() == 5
    assert sorted(path.name for path in (folder / "made").iterdir()) == ["2", "5"]
    with Checkpoints(folder / "made", keep=2) as checkpoints:
        assert checkpoints.latest() == 5
        like = state | {"step": place(np.array(0), range(8))}
        for step in (2, 5, None):
            restored, extra = checkpoints.restore(like, step)
            assert extra == [step or 5]
            assert fetch(restored["step"]) == step or 5


def test_saving_goes_on_after_a_disk_was_full(folder, monkeypatch):
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            if jax.process_index() == jax.process_count() - 1:
                for module in (handler, parts):
                    patch.setattr(module, "write", fail)
            checkpoints.save(2, state)
            with pytest.raises(SaveError, match="No space left") as caught:
                checkpoints.wait()
        assert len(set(ranks.everywhere(str(caught.value)))) == 1
        assert checkpoints.latest() == 1
        checkpoints.save(2, state)
        assert checkpoints.latest() == 2
        assert_identical(numbers(checkpoints.restore(state)[0]), numbers(state))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


async def fail(state, folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_saved_or_restored(folder):
    state = make_state()
    array = state["step"]
    (folder / "9").mkdir(exist_ok=True)
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(RestoreError, match=r"was not written by Checkpoints\.save"):
            checkpoints.restore(state)
        for call, message in [
            (lambda: checkpoints.restore(state, 3), r"\[9\]. Got 3"),
            (lambda: checkpoints.save(9, state), "larger than 9"),
            (lambda: checkpoints.save(8, state), "larger than 9"),
            (lambda: checkpoints.save(True, state), "must be an integer"),
            (lambda: checkpoints.save(10, state, {"when": object()}), "JSON can hold"),
            (lambda: checkpoints.save(10, state, {"loss": float("nan")}), "JSON can hold"),
            (lambda: checkpoints.save(10, None), "at least one array. Got None"),
            (lambda: checkpoints.restore(None), "at least one array. Got None"),
            (lambda: checkpoints.save(10, {"a": array, "b": 1.0}), r"\['b'\] must be a jax.Array"),
            (
                lambda: checkpoints.save(10, {"a": place(np.zeros(0), range(8))}),
                "must have entries",
            ),
        ]:
            with pytest.raises(UsageError, match=message):
                call()
        array.delete()
        with pytest.raises(UsageError, match="donated"):
            checkpoints.save(10, state)
        if jax.process_count() > 1:
            with pytest.raises(RankMismatchError, match="step of rank 1 differs"):
                checkpoints.save(jax.process_index(), {"a": make_state()["across"]})
            mine = {"a": jax.device_put(np.ones(2), jax.local_devices()[0])}
            with pytest.raises(RankMismatchError, match="devices of the state leaf"):
                checkpoints.save(10, mine)


def test_folders_that_are_none(folder):
    (folder / "file").write_text("")
    for place in (folder / "file", folder / "file" / "below", "/proc/no_such_folder"):
        with pytest.raises(UsageError, match="cannot be written to"):
            Checkpoints(place)
    for place in ("gs://bucket/checkpoints", None):
        with pytest.raises(UsageError, match="not the address of a store"):
            Checkpoints(place)
    with pytest.raises(UsageError, match="positive integer"):
        Checkpoints(folder, keep=0)
    with pytest.raises(UsageError, match="True or False"):
        Checkpoints(folder, asynchronous="no")
    with (
        Checkpoints(folder / "new") as checkpoints,
        pytest.raises(UsageError, match="no checkpoint"),
    ):
        checkpoints.restore(make_state())


@pytest.mark.parametrize("damaged", ["state/_METADATA", "state/d", "extra/metadata", "state"])
def test_a_damaged_checkpoint_and_then_the_one_before(folder, damaged):
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        for step in (np.int64(1), place(np.array(2), range(8))):  # any integer will do
            checkpoints.save(step, state, int(step))
        assert checkpoints.latest() == 2
        if jax.process_index() == 0:
            damage(folder / "2" / damaged)
        with pytest.raises(RestoreError) as caught:
            checkpoints.restore(state)
        messages = set(ranks.everywhere(str(caught.value)))
        assert len(messages) == 1
        assert f"{folder / '2'} cannot be read: it is damaged" in messages.pop()
        restored, extra = checkpoints.restore(state, 1)
        assert extra == 1
        assert_identical(numbers(restored), numbers(state))


def damage(path):
    """Cuts a file to half; a folder loses all its files."""
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_two_objects_see_one_folder(folder):
    state = make_state()
    with Checkpoints(folder) as first, Checkpoints(folder) as second:
        first.save(1, state)
        assert first.latest() == second.latest() == 1
        with pytest.raises(UsageError, match="larger than 1"):
            second.save(1, state)
        assert_identical(numbers(second.restore(state)[0]), numbers(state))


def test_a_folder_that_was_closed(folder):
    with Checkpoints(folder) as checkpoints:
        pass
    for call in (checkpoints.latest, lambda: checkpoints.save(1, make_state())):
        with pytest.raises(UsageError, match="Open the folder anew"):
            call()
