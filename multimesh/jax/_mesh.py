"""The mesh that a step runs on, as users get it back."""

import warnings

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.stages.registry import Registry

__all__ = ["StepMesh", "all_devices", "plain_mesh"]


class StepMesh:
    """A `jax.sharding.Mesh` that works in `with mesh:`, and remembers the tasks of its step.

    `Mesh.__enter__` warns that it is deprecated, and JAX turns subclasses back into plain meshes:
    so this is an object of its own that delegates to the mesh.

    Attributes:
      mesh: The JAX mesh, for `NamedSharding(mesh.mesh, spec)`.
      registry: The tasks that were registered when the step was built.
    """

    def __init__(self, mesh: Mesh, registry: Registry):
        self.mesh = mesh
        self.registry = registry

    def __enter__(self) -> "StepMesh":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.mesh.__enter__()
        return self

    def __exit__(self, *details) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.mesh.__exit__(*details)

    def __getattr__(self, name: str):
        return getattr(self.mesh, name)

    def __repr__(self) -> str:
        return f"StepMesh({self.mesh!r})"


def plain_mesh(mesh: "Mesh | StepMesh | None") -> Mesh:
    """Returns the JAX mesh of what a user gave; None means all devices."""
    if mesh is None:
        return all_devices()
    return mesh.mesh if isinstance(mesh, StepMesh) else mesh


def all_devices() -> Mesh:
    """Returns all devices along one axis."""
    return Mesh(np.array(jax.devices()), ("devices",))
