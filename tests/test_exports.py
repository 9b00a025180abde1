"""The public names. Whoever changes one changes this file, and the CHANGELOG."""

import importlib

import pytest

PUBLIC = {
    "multimesh": ["__version__", "init", "preempted"],
    "multimesh.errors": [
        "BatchError",
        "MultimeshError",
        "PlacementError",
        "RankMismatchError",
        "RegistryError",
        "RestoreError",
        "SaveError",
        "ScheduleError",
        "StallError",
        "StartupError",
        "UsageError",
    ],
    "multimesh.jax": [
        "Task",
        "TaskMesh",
        "Weighted",
        "autoshard",
        "clear_tasks",
        "context",
        "enable_fast_path",
        "enable_recomputation",
        "enable_task_fusion",
        "fetch",
        "ignore_transforms",
        "microbatch",
        "mjit",
        "only_fuse_loop_tasks",
        "parallelize",
        "prefetch",
        "register_task",
        "task",
        "tasks",
        "with_sharding_constraint",
    ],
    "multimesh.jax.checkpoint": ["Checkpoints"],
    "multimesh.jax.flax": [
        "GlobalStep",
        "LocalStep",
        "parallelize_eval",
        "parallelize_step",
        "shard_axes",
        "task",
    ],
    "jax_plugins.multimesh": ["init", "initialize"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    module = importlib.import_module(module)
    assert sorted(module.__all__) == PUBLIC[module.__name__]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", [name for name in PUBLIC if name.startswith("multimesh.")])
def test_public_names_have_docstrings(module):
    module = importlib.import_module(module)
    assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []


def test_init_has_one_implementation():
    assert (
        importlib.import_module("multimesh").init
        is importlib.import_module("jax_plugins.multimesh").init
    )


def test_errors_can_be_caught_by_their_general_names():
    errors = importlib.import_module("multimesh.errors")
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.MultimeshError)
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.StallError, TimeoutError)
