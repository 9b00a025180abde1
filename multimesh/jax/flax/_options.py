"""Checks of the arguments that training and evaluation share."""

from typing import Any

from jax.sharding import Mesh

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.fingerprint import compare
from multimesh.jax.flax._mesh import StepMesh, plain_mesh
from multimesh.launch import require_init
from multimesh.stages.registry import default_registry
from multimesh.step import Context
from multimesh.transport import connect

__all__ = ["batch_spec", "check_reduction", "compare_requests", "make_context"]


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
    if spec.rows % num_microbatches:
        raise UsageError(
            f"The {spec.rows} rows of the batch do not divide by "
            f"num_microbatches={num_microbatches}. Microbatches of two sizes are not supported "
            "yet: change either number."
        )
    return spec


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
