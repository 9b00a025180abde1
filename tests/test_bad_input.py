"""What a user can get wrong in one process: a clear error, before anything is compiled.

Mistakes of the launch are tests/launch's, differences between ranks tests/mpi's.
"""

import contextlib
from dataclasses import replace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support import cases, models, oracle, plans, ranks

from multimesh.batch import BatchSpec
from multimesh.errors import BatchError, PlacementError, RegistryError, UsageError
from multimesh.jax import Task, TaskMesh, Weighted, clear_tasks, register_task
from multimesh.jax.flax import parallelize_eval, parallelize_step

CASE = cases.CASES["mlp"]
LAYOUT = cases.apart(2)
ROWS = 16


@pytest.fixture(scope="module")
def trained():
    """A step that works, the state before it, and its first loss.

    It also leaves JAX's own little programs compiled, such as the one that makes a key.
    """
    step_fn, state, _ = cases.build(CASE, LAYOUT, ROWS, 2, donate=False)
    loss, _ = step_fn(state, CASE.make_batch(ROWS, 0))
    return step_fn, state, float(loss)


@pytest.fixture(autouse=True)
def registry(trained):
    clear_tasks()
    yield
    clear_tasks()


@contextlib.contextmanager
def rejected(error, *words):
    """The body raises `error` with all the words in its message, and compiles nothing."""
    with ranks.noted_compilations() as compilations, pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert not compilations
    assert [word for word in words if word not in message] == [], message


def mesh(devices=(0, 1, 2, 3), sizes=(4, 1)):
    return TaskMesh(devices=devices, axis_names=("x", "y"), axis_sizes=sizes)


def build(case=CASE, rows=ROWS, **options):
    """Builds with the tasks that a test has registered."""
    arguments = {
        "loss_fn": case.loss_fn,
        "reduction": case.reduction,
        "global_batch": case.make_batch(rows, 0),
    }
    return parallelize_step(case.model, case.optimizer, **(arguments | options))


# ---------------------------------------------------------------- devices


def test_a_device_out_of_range():
    with rejected(RegistryError, "8", "layer_0"):
        register_task("layer_0", task=Task(mesh=mesh((5, 6, 7, 8))))
        build()


@pytest.mark.parametrize("devices", [(0, 1, 2, 2), (3, 3, 3, 3)])
def test_a_device_used_twice(devices):
    with rejected(RegistryError, str(devices[-1])):
        mesh(devices)


def test_a_negative_device():
    with rejected(RegistryError, "-1"):
        mesh((-1, 0, 1, 2))


def test_sizes_that_do_not_make_the_number_of_devices():
    with rejected(RegistryError, "(2, 3)", "4"):
        mesh(sizes=(2, 3))
    with rejected(RegistryError, "3", "4"):
        mesh().place((4, 5, 6))


# ---------------------------------------------------------------- the registry


def test_a_logical_axis_that_does_not_divide_a_parameter():
    model = models.Mlp((16, 6))
    case = replace(CASE, model=model)
    register_task("layer_0", task=Task(mesh=mesh(), logical_axes=[("batch", "x")]))
    register_task(
        "layer_1", task=Task(mesh=mesh((4, 5, 6, 7), (1, 4)), logical_axes=[("model", "y")])
    )
    with rejected(RegistryError, "layer_1", "kernel", "'y'", "(16, 6)", "4"):
        build(case)


def test_a_pattern_that_matches_nothing():
    cases.register(CASE, LAYOUT)
    register_task("layer_2", task=Task(mesh=mesh()))
    with rejected(RegistryError, "layer_2", "layer_0", "layer_1"):
        build()


def test_a_pattern_matches_whole_names_only():
    cases.register(CASE, LAYOUT)
    register_task("layer", task=Task(mesh=mesh()))
    with rejected(RegistryError, "'layer'"):
        build()


def test_two_patterns_for_one_scope():
    cases.register(CASE, LAYOUT)
    register_task(r"layer_\d", task=Task(mesh=mesh()))
    with rejected(RegistryError, repr(r"layer_\d"), "'layer_0'"):
        build()


def test_an_invalid_pattern():
    with rejected(RegistryError, "layer_("):
        register_task("layer_(", task=Task(mesh=mesh()))


@pytest.mark.parametrize("result", [None, "layer_0", mesh()], ids=["None", "str", "TaskMesh"])
def test_a_callback_that_returns_no_task(result):
    with rejected(RegistryError, "callback", "(layer_", repr(result)[:8]):
        register_task(r"(layer_\d+)", callback=lambda name, backprop: result)
        build()


def test_neither_a_task_nor_a_callback():
    with rejected(RegistryError, "task", "callback"):
        register_task("layer_0")
    with rejected(RegistryError, "task", "callback"):
        register_task("layer_0", task=Task(mesh=mesh()), callback=lambda name, backprop: None)


def test_a_logical_axis_on_an_axis_that_the_mesh_lacks():
    with rejected(RegistryError, "'z'", "x"):
        Task(mesh=mesh(), logical_axes=[("batch", "z")])


@pytest.mark.parametrize("whole", [True, False], ids=["mesh given", "no mesh given"])
def test_no_task_at_all_is_one_program(whole):
    """The one item of the list that is no mistake."""
    axes = ("batch", "data", "model")
    given = Mesh(np.array(jax.devices()).reshape(8, 1, 1), axes) if whole else None
    built = build(mesh=given, num_microbatches=2)
    batches = CASE.batches(ROWS, 2)
    got = oracle.train_pipeline(built.step_fn, built.train_state, batches)
    oracle.assert_same_training(got, oracle.train(CASE, batches))
    if whole:
        kernel = jax.tree.leaves(built.train_state.params)[0]
        assert plans.devices_of(kernel) == set(range(8))


# ---------------------------------------------------------------- batches


WRONG_LEAVES = {
    "rank": ("inputs", lambda x: x[..., None], ("16, 16, 1", "16, 16")),
    "rows of one leaf": ("labels", lambda x: x[:12], ("12", "16")),
    "no rows": ("labels", lambda x: x[0], ("1 dimension", "int32[]")),
    "dtype": ("labels", lambda x: x.astype(np.float32), ("float32", "int32")),
    "complex": ("inputs", lambda x: x.astype(np.complex64), ("complex64", "float32")),
    "text": ("inputs", lambda x: x.astype(str), ("inputs",)),
}


@pytest.mark.parametrize("name", WRONG_LEAVES)
def test_a_wrong_leaf(trained, name):
    step_fn, state, loss = trained
    leaf, spoil, words = WRONG_LEAVES[name]
    batch = CASE.make_batch(ROWS, 0)
    with rejected(BatchError, leaf, *words):
        step_fn(state, batch | {leaf: spoil(batch[leaf])})
    # The mistake costs nothing: the state is still there, and so is the step.
    assert float(step_fn(state, batch)[0]) == loss


def test_features_that_the_model_refuses(trained):
    step_fn, state, loss = trained
    batch = CASE.make_batch(ROWS, 0)
    # Another shape is a step of its own, and what is wrong with it only the model knows.
    with rejected(flax.errors.ScopeParamShapeError, "(17, 16)", "(16, 16)"):
        step_fn(state, batch | {"inputs": np.zeros((ROWS, 17), np.float32)})
    assert float(step_fn(state, batch)[0]) == loss


def test_a_wrong_tree(trained):
    step_fn, state, _ = trained
    batch = CASE.make_batch(ROWS, 0)
    with rejected(BatchError, "lacks ['labels']."):
        step_fn(state, {"inputs": batch["inputs"]})
    with rejected(BatchError, "should not have ['extra']."):
        step_fn(state, batch | {"extra": batch["labels"]})
    with rejected(BatchError, "lacks ['inputs'], ['labels']. It should not have [0], [1]."):
        step_fn(state, tuple(batch.values()))
    with rejected(UsageError, "The state", "lacks", ".step", "should not have a single array"):
        step_fn(state.step, batch)


class LikeTorch:
    """A tensor of a type that NumPy does not know, as torch's of bfloat16 on the CPU."""

    def __init__(self, array):
        self.array = jnp.asarray(array)
        self.shape, self.dtype = array.shape, "torch.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_tensor_of_bfloat16_is_an_array():
    array = np.arange(6, dtype=jnp.bfloat16).reshape(3, 2)
    spec = BatchSpec.of({"x": array}, "global_batch")
    assert spec.like({"x": LikeTorch(array)}) == spec
    np.testing.assert_array_equal(spec.flatten({"x": LikeTorch(array)})[0], array)
    other = LikeTorch(array.astype(np.float32))
    with rejected(BatchError, "['x']", "bfloat16", "float32"):
        spec.like({"x": other})


def test_a_wide_dtype_that_jax_narrows_is_no_mistake(trained):
    step_fn, state, loss = trained
    batch = CASE.make_batch(ROWS, 0)
    wide = {"inputs": batch["inputs"].astype(np.float64), "labels": batch["labels"].astype("i8")}
    assert float(step_fn(state, wide)[0]) == loss


def test_a_wrong_leaf_in_prepare_batch():
    cases.register(CASE, LAYOUT)
    batch = CASE.make_batch(ROWS, 0)
    built = build(global_batch=None, local_batch=batch)
    with rejected(BatchError, "labels", "float32", "int32"):
        built.prepare_batch(batch | {"labels": batch["labels"].astype(np.float32)})


def test_leaves_with_different_rows():
    cases.register(CASE, LAYOUT)
    batch = CASE.make_batch(ROWS, 0)
    batch["labels"] = batch["labels"][:12]
    with rejected(BatchError, "labels", "12", "16"):
        build(global_batch=batch)


def test_more_microbatches_than_rows():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "8", "4"):
        build(rows=4, num_microbatches=8)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_microbatches_that_are_no_count(count):
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "num_microbatches", repr(count)):
        build(num_microbatches=count)


@pytest.mark.parametrize("both", [True, False])
def test_both_kinds_of_batch_or_neither(both):
    cases.register(CASE, LAYOUT)
    batch = CASE.make_batch(ROWS, 0) if both else None
    with rejected(UsageError, "local_batch", "global_batch"):
        build(global_batch=batch, local_batch=batch)


@pytest.mark.parametrize(
    ("argument", "value", "word"),
    [
        ("rng", 3, "jax.random.key"),
        ("rng", np.zeros(3, np.uint32), "(3,)"),
        ("batch_axis", None, "name"),
        ("batch_axis", "rows", "logical_axes"),
        ("donate", "maybe", "True or False"),
        ("init_fn", lambda key, batch: None, "NoneType"),
        ("loss_fn", lambda params, batch: None, "NoneType"),
        ("loss_fn", lambda params, batch: Weighted(batch["inputs"].sum(), None), "NoneType"),
        ("loss_fn", lambda params, batch: 1.0, "does the loss use the model?"),
    ],
)
def test_arguments_of_the_wrong_kind(argument, value, word):
    cases.register(CASE, LAYOUT)
    with rejected(ValueError, argument.removesuffix("_fn"), word):
        build(**{argument: value})


def test_an_evaluation_for_a_rank_that_does_not_exist(trained):
    _, state, _ = trained
    with rejected(UsageError, "rank from 0 to 0", "5"):
        parallelize_eval(CASE.model, state, global_batch=CASE.make_batch(ROWS, 0), to=5)


# ---------------------------------------------------------------- losses and models


def test_a_scalar_loss_of_several_microbatches_without_a_reduction():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "reduction", "mean", "sum", "Weighted"):
        build(num_microbatches=2, reduction=None)


def test_an_unknown_reduction():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "reduction", "'median'", "mean", "sum"):
        build(reduction="median")


def test_an_unknown_schedule():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "'2f2b'", "1f1b", "gpipe"):
        build(schedule="2f2b")


def test_a_loss_that_is_no_scalar():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "loss", "(16, 16)"):
        build(loss_fn=CASE.model.apply)


def test_an_integer_loss():
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "loss", "int32"):
        build(loss_fn=lambda params, batch: batch["labels"].sum())


def test_metrics_where_none_are_announced():
    metrics = cases.CASES["metrics"]
    cases.register(metrics, LAYOUT)
    with rejected(UsageError, "has_aux"):
        build(metrics, has_aux=False)
    with rejected(UsageError, "has_aux"):
        build(CASE, has_aux=True)


class Mapped(nn.Module):
    """Uses `shard_map` over the user's mesh."""

    mesh: Mesh

    @nn.compact
    def __call__(self, batch):
        x = nn.Dense(16, name="layer_0")(batch["inputs"])
        double = jax.shard_map(lambda x: 2 * x, mesh=self.mesh, in_specs=P("x"), out_specs=P("x"))
        return nn.Dense(16, name="layer_1")(double(x))


def test_shard_map_inside_the_model():
    given = Mesh(np.array(jax.devices()).reshape(8, 1), ("x", "y"))
    cases.register(CASE, LAYOUT)
    with rejected(UsageError, "shard_map"):
        build(replace(CASE, model=Mapped(given)), mesh=given)


def test_a_large_value_gathered_from_several_submeshes():
    cases.register(CASE, LAYOUT)
    # Small vectors may be gathered; these kernels are 4 and 16 KiB.
    model = models.Mlp((64, 64))
    with rejected(PlacementError, "concatenate"):
        build(replace(CASE, model=model, optimizer=optax.flatten(optax.adam(1e-2))))


def test_an_error_in_the_model_is_shown_as_it_is():
    cases.register(CASE, LAYOUT)

    def loss_fn(params, batch):
        raise KeyError("no such leaf")

    with pytest.raises(KeyError, match="no such leaf"):
        build(loss_fn=loss_fn)
