"""Flax modules as tasks, and initializers with named axes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx

from multimesh.errors import UsageError
from multimesh.jax import _task

__all__ = ["shard_axes", "task"]

Fun = TypeVar("Fun", bound=Callable[..., Any])


def task(
    fun: Fun,
    name: str | None = None,
    *,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: Any = None,
    color: Any = None,
) -> Fun:
    """`multimesh.jax.task`, also for Flax modules: `task(nn.Dense, mesh=mesh)(features=8)`.

    Args:
      fun: A Linen or NNX module class, of which this returns a subclass; a module, whose class
        becomes that subclass; or what `multimesh.jax.task` takes.
      name: As there; likewise all others.
      mesh: The submesh.
      devices: Or its devices.
      device_axes: The names of their axes.
      logical_axes: What the logical axis names mean.
      color: What keeps it apart from tasks on the same submesh.

    Returns:
      The class, module or function.

    Raises:
      RegistryError: The arguments do not fit together.
      UsageError: The module is a task already.
    """
    options: dict[str, Any] = {"mesh": mesh, "devices": devices, "device_axes": device_axes}
    options |= {"logical_axes": logical_axes, "color": color}
    if not isinstance(fun, nn.Module | nnx.Module):
        return _task.task(fun, name, **options)
    if _task.TASK_SCOPE in vars(type(fun)):
        raise UsageError(
            f"This {type(fun).__name__} is a task already: multimesh.jax.flax.task makes the very "
            "module that it is given one. Call it once, or make another module."
        )
    name = name or getattr(fun, "name", None)
    # A copy would be another child of the module that it stands in.
    object.__setattr__(fun, "__class__", _task.task(type(fun), name, **options))
    return fun


def shard_axes(*axes: str | None) -> Callable[..., Any]:
    """A Xavier-normal initializer whose parameter has named axes.

    Args:
      *axes: The logical name of each dimension, or None.

    Returns:
      An initializer for `nn.Dense(..., kernel_init=shard_axes("data", "model"))`. The values are
      those of `nn.initializers.xavier_normal()` (Glorot and Bengio, 2010).
    """
    return nn.with_partitioning(nn.initializers.xavier_normal(), axes)
