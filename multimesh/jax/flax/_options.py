"""Checks of the arguments that training and evaluation share."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.fingerprint import compare
from multimesh.jax.flax._linen import LinenModel
from multimesh.jax.flax._model import Model
from multimesh.jax.flax._nnx import NnxModel, NnxTrainState
from multimesh.source import Context
from multimesh.trees import list_names

__all__ = [
    "batch_spec",
    "check_axis",
    "check_flags",
    "check_reduction",
    "collection_names",
    "compare_requests",
    "evaluation",
    "key_parts",
    "make_model",
    "random_keys",
]


def batch_spec(local_batch: Any, global_batch: Any, num_microbatches: Any) -> BatchSpec:
    """Checks the example batch and the number of microbatches.

    Raises:
      UsageError: Not exactly one batch was given, or the rows cannot be divided.
    """
    if (local_batch is None) == (global_batch is None):
        raise UsageError(
            "Give exactly one of local_batch= (this process's share of the rows) and "
            "global_batch= (all rows, the same on every rank). "
            f"Got {'neither' if local_batch is None else 'both'}."
        )
    if (
        isinstance(num_microbatches, bool)
        or not isinstance(num_microbatches, int)
        or num_microbatches < 1
    ):
        raise UsageError(f"num_microbatches must be a positive integer. Got {num_microbatches!r}.")
    if local_batch is not None:
        spec = BatchSpec.of(local_batch, "local_batch")
    else:
        spec = BatchSpec.of(global_batch, "global_batch")
    if num_microbatches > spec.rows:
        raise UsageError(
            f"num_microbatches={num_microbatches} is more than the {spec.rows} rows of the batch "
            f"({spec.names[0]} has shape {spec.shapes[0]}). Each microbatch needs a row."
        )
    return spec


def check_flags(**flags: Any) -> None:
    """Checks arguments that are True or False.

    Raises:
      UsageError: One is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False. Got {value!r}.")


def random_keys(rngs: Any) -> dict[str, tuple[np.ndarray, Any]]:
    """Takes base keys apart into data and implementation.

    Args:
      rngs: A mapping from kind to key, or None.

    Raises:
      UsageError: It is something else.
    """
    expected = "rngs must be a dict from kind to key, such as dict(dropout=jax.random.key(0)). "
    if rngs is None:
        return {}
    if not isinstance(rngs, Mapping) or not all(isinstance(name, str) for name in rngs):
        raise UsageError(f"{expected}Got {rngs!r}.")
    return {name: key_parts(key, f"{expected}Got {{}} for {name!r}.") for name, key in rngs.items()}


def key_parts(key: Any, problem: str) -> tuple[np.ndarray, Any]:
    """Takes a random key apart into data and implementation (None: a raw key).

    Args:
      key: What the user gave.
      problem: The error for what is no key; `{}` stands for what was got.

    Raises:
      UsageError: It is no single key.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        raise UsageError(problem.format(repr(key)))
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.shape != (() if typed else (2,)):
        raise UsageError(problem.format(f"an array of shape {key.shape}"))
    impl = jax.random.key_impl(key) if typed else None
    return np.asarray(jax.random.key_data(key) if typed else key), impl


def collection_names(mutable: Any) -> tuple[str, ...]:
    """Checks the names of the mutable collections.

    Raises:
      UsageError: They are no names, or include the parameters.
    """
    if mutable is None:
        return ()
    names = (mutable,) if isinstance(mutable, str) else mutable
    valid = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not valid or "params" in names:
        raise UsageError(
            'mutable must be a list of collections, such as ["batch_stats"], without "params", '
            f"which the optimizer updates. Got {mutable!r}."
        )
    return tuple(names)


def make_model(model: Any, init_fn: Any, kinds: tuple[str, ...], mutable: tuple[str, ...]) -> Model:
    """Finds out which kind of model a user gave.

    Args:
      model: A Linen module, an NNX module, or a function that makes one.
      init_fn: How a Linen module's parameters are made, or None.
      kinds: The kinds of random numbers, for a Linen module.
      mutable: The collections that a Linen module updates.

    Raises:
      UsageError: It is none of these, or is given what only Linen modules take.
    """
    if isinstance(model, nn.Module):
        return LinenModel(model, init_fn, kinds, mutable)
    if isinstance(model, type) or not callable(model):
        raise UsageError(
            "model must be a Flax module instance (Linen or NNX), or a function from nnx.Rngs to "
            f"an nnx.Module. Got {model!r}."
        )
    for name, given in (("init_fn", init_fn), ("rngs", kinds), ("mutable", mutable)):
        if given:
            raise UsageError(
                f"{name} is for Linen modules: an NNX model makes and holds all its variables "
                f"itself. Got {name}={given!r}; leave it out."
            )
    return NnxModel(model)


def evaluation(model: Any, state: TrainState) -> tuple[Model, Callable]:
    """Finds out what a user wants to evaluate on a state.

    Args:
      model: A module, or a function.
      state: A state of a training step.

    Returns:
      The model, and the function to call.

    Raises:
      UsageError: It is something else, or does not fit the state.
    """
    if isinstance(state, NnxTrainState):
        return _nnx_evaluation(model, state)
    if isinstance(model, nn.Module):
        return LinenModel(model), model.apply
    if isinstance(model, nnx.Module | type) or not callable(model):
        raise UsageError(
            "For a state of a Linen model, model must be a Linen module, or a function "
            f"(params, batch) -> outputs. Got {model!r}."
        )
    return LinenModel(None), model


def _nnx_evaluation(model: Any, state: NnxTrainState) -> tuple[Model, Callable]:
    if isinstance(model, nnx.Module):
        wrapped = NnxModel(model)
        if wrapped.definition.leaves != state.definition.leaves:
            raise UsageError(
                "model must have the variables of the model that train_state is of. Got "
                f"{type(model).__name__} with other variables; give train_state.model(), or a "
                "function (model, batch) -> outputs."
            )
        return wrapped, wrapped.default
    if isinstance(model, nn.Module | type) or not callable(model) or not _takes_two(model):
        raise UsageError(
            "For a state of an NNX model, model must be an NNX module, or a function "
            f"(model, batch) -> outputs. Got {model!r}."
        )
    return NnxModel(None, state.definition), model


def _takes_two(function: Callable) -> bool:
    """Whether a function can be called with a model and a batch."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function of C has no signature to look at
        return True
    return True


def check_axis(batch_axis: Any, context: Context) -> None:
    """Checks the logical name of the rows.

    Raises:
      UsageError: It is no string, or another one than the usual that no task maps.
    """
    if not isinstance(batch_axis, str):
        raise UsageError(f'batch_axis must be a name, such as "batch". Got {batch_axis!r}.')
    entries = context.registry.entries
    known = context.axis_names("batch")
    # What a callback's task maps is not known yet.
    if entries and all(entry.task for entry in entries) and batch_axis not in known:
        raise UsageError(
            f"batch_axis={batch_axis!r} is in no task's logical_axes, so no rows would be spread "
            f"over devices. Known names are {list_names(known)}."
        )


def check_reduction(reduction: Any) -> None:
    """Checks the name of a reduction.

    Raises:
      UsageError: It is not one of "mean", "sum" and None.
    """
    if reduction not in (None, "mean", "sum"):
        raise UsageError(f'reduction must be "mean", "sum" or None. Got {reduction!r}.')


def compare_requests(context: Context, spec: BatchSpec, options: dict[str, Any]) -> None:
    """Checks that all ranks ask for the same, before anything is traced. Collective.

    Raises:
      RankMismatchError: On every rank: what differs, and where.
    """
    compare(
        context.group,
        {
            "registered tasks": "; ".join(context.registry.describe()) or "(none)",
            "batch": str(
                dict(zip(spec.names, zip(spec.dtypes, spec.shapes, strict=True), strict=True))
            ),
            "mesh": str(context.mesh),
            **{name: repr(value) for name, value in options.items()},
        },
        "Give every rank the same arguments.",
    )
