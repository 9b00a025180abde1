"""Checks of the arguments that training and evaluation share."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.fingerprint import compare
from multimesh.jax.flax._mesh import StepMesh, plain_mesh
from multimesh.launch import require_init
from multimesh.source import Context
from multimesh.stages.registry import default_registry
from multimesh.transport import connect

__all__ = [
    "batch_spec",
    "check_reduction",
    "collection_names",
    "compare_requests",
    "make_context",
    "random_keys",
]


def make_context(mesh: "Mesh | StepMesh | None") -> Context:
    """Finds the devices, the tasks and the other ranks.

    Args:
      mesh: What the user gave; a `StepMesh` brings the tasks of its step.

    Raises:
      StartupError: A launcher started several ranks, but `init` was not called.
      UsageError: `mesh` is no mesh.
    """
    require_init()
    if mesh is not None and not isinstance(mesh, Mesh | StepMesh):
        raise UsageError(f"mesh must be a jax.sharding.Mesh or None. Got {mesh!r}.")
    registry = mesh.registry if isinstance(mesh, StepMesh) else default_registry.snapshot()
    group, transport = connect()
    return Context(plain_mesh(mesh), registry, group, transport)


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


def random_keys(rngs: Any) -> dict[str, tuple[np.ndarray, Any]]:
    """Takes base keys apart into data and implementation.

    Args:
      rngs: A mapping from kind to key, or None.

    Raises:
      UsageError: It is something else.
    """
    expected = 'rngs must be a dict from kind to key, such as {"dropout": jax.random.key(0)}. '
    if rngs is None:
        return {}
    if not isinstance(rngs, Mapping) or not all(isinstance(name, str) for name in rngs):
        raise UsageError(f"{expected}Got {rngs!r}.")
    keys = {}
    for name, key in rngs.items():
        if not isinstance(key, jax.Array | np.ndarray):
            raise UsageError(f"{expected}Got {key!r} for {name!r}.")
        typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.shape != (() if typed else (2,)):
            raise UsageError(f"{expected}Got an array of shape {key.shape} for {name!r}.")
        impl = jax.random.key_impl(key) if typed else None
        keys[name] = np.asarray(jax.random.key_data(key) if typed else key), impl
    return keys


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
