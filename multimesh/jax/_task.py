"""`task`: a function, or a class of callables, that brings its own submesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from multimesh.errors import RegistryError, UsageError
from multimesh.stages.meshes import task_meshes
from multimesh.stages.registry import default_registry
from multimesh.stages.tasks import Task

__all__ = ["TASK_SCOPE", "task"]

TASK_SCOPE = "_multimesh_task_scope"  # the attribute by which a class is known to be a task's

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
    """Makes a function a task: within a step it runs on a submesh of its own.

    Its equations carry a name scope that no other task has. The innermost task of nested ones wins,
    whether `task` or `register_task` made it. Outside of a step the function runs as it is.

    Args:
      fun: A function, a callable object, or a class whose instances are callable, of which this
        returns a subclass. (For Flax modules there is `multimesh.jax.flax.task`.)
      name: A name for plans and errors; by default the function's.
      mesh: The submesh: a `TaskMesh` or a `jax.sharding.Mesh`.
      devices: Or its devices: positions in `jax.devices()`, or an array of devices, whose shape is
        that of the submesh. With `mesh`, the devices on which its axes are put.
      device_axes: The names of the axes of `devices`.
      logical_axes: As in `Task`: by default the device axes' names are the logical names.
      color: As in `Task`.

    Returns:
      The function, or the class.

    Raises:
      RegistryError: The arguments do not fit together.
      UsageError: `fun` cannot be called.
    """
    if not callable(fun):
        raise UsageError(f"task needs a function or a class of callables. Got {fun!r:.80}.")
    name = name or getattr(fun, "__name__", type(fun).__name__)
    meshes = task_meshes(mesh, devices, None, device_axes)
    if len(meshes) > 1:
        raise RegistryError(
            f"The task {name!r} needs as many devices as its mesh has: "
            f"{len(meshes[0].devices)}. Got {len(meshes[0].devices) * len(meshes)}. "
            "register_task(regex, mesh=, devices=) rotates over more of them."
        )
    if _is_flax_module(fun):
        raise UsageError(
            f"multimesh.jax.task would make a function of this {type(fun).__name__}, which would "
            "be no module any more. Use multimesh.jax.flax.task."
        )
    task = Task(meshes[0], logical_axes, name, color)
    scope = default_registry.add_explicit(task, _origin(fun))
    if isinstance(fun, type):
        return _subclass(fun, scope)
    return _within(fun, scope)


def _is_flax_module(fun: Any) -> bool:
    """Whether it is an instance; Flax itself need not be imported to know."""
    return any(
        base.__module__.startswith("flax.") and base.__name__ == "Module"
        for base in type(fun).__mro__
    )


def _origin(fun: Any) -> Any:
    """What a function is known by: the same when it is made again by the same code."""
    if not isinstance(fun, type) and not hasattr(fun, "__code__"):
        return type(fun)
    return getattr(fun, "__code__", fun)


def _within(function: Callable[..., Any], scope: str) -> Any:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return function(*args, **kwargs)

    return scoped


def _subclass(cls: type, scope: str) -> Any:
    """A class of the same name whose instances are called within a scope."""
    # Every class has a `__call__` of its metaclass's: that which makes instances.
    call = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        raise UsageError(f"task needs a class whose instances can be called. Got {cls!r}.")

    @functools.wraps(call)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return super(made, self).__call__(*args, **kwargs)

    body = {
        TASK_SCOPE: scope,
        "__call__": scoped,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    body["__qualname__"] = cls.__qualname__
    made: Any = type(cls)(cls.__name__, (cls,), body)
    return made
