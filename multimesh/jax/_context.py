"""Where a step runs: the devices, the tasks, the other ranks, and what the user has chosen."""

from jax.sharding import Mesh

from multimesh.errors import UsageError
from multimesh.jax._contexts import chosen_options
from multimesh.jax._mesh import StepMesh, plain_mesh
from multimesh.launch import require_init
from multimesh.source import Context
from multimesh.stages.registry import default_registry
from multimesh.transport import connect

__all__ = ["make_context"]


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
    return Context(plain_mesh(mesh), registry, group, transport, chosen_options())
