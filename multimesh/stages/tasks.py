"""What a task is: a submesh, and what logical axis names mean on it."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from multimesh.errors import RegistryError
from multimesh.stages.meshes import AxisName, TaskMesh, task_meshes

__all__ = ["DeviceAxes", "Form", "Rotation", "Task", "dict_items"]

DeviceAxes = AxisName | tuple[AxisName, ...] | None


@dataclass(frozen=True)
class Task:
    """Where the modules of a scope run, and how their logical axes lie on the devices.

    Attributes:
      mesh: The submesh.
      logical_axes: Pairs (logical name, device axis | tuple of device axes | None). A logical name
        without an entry is replicated. None: the device axis names are the logical names.
      name: A name for plans and errors; by default the matched scope.
      color: Tasks of different colors are never compiled into one program, even on one submesh.

    Raises:
      RegistryError: A pair names a device axis that the mesh does not have, or a logical name
        appears twice.
    """

    mesh: TaskMesh
    logical_axes: tuple[tuple[AxisName, DeviceAxes], ...] | None = None
    name: str | None = None
    color: Any = None

    def __post_init__(self):
        if not isinstance(self.mesh, TaskMesh):
            raise RegistryError(f"Task.mesh must be a TaskMesh. Got {self.mesh!r}.")
        if self.name is not None and not isinstance(self.name, str):
            raise RegistryError(f"The name of a task must be a text. Got {self.name!r}.")
        if self.logical_axes is None:
            pairs = tuple((name, name) for name in self.mesh.axis_names)
        else:
            pairs = tuple(self._pair(pair) for pair in dict_items(self.logical_axes))
        object.__setattr__(self, "logical_axes", pairs)
        if not isinstance(self.color, Hashable):
            raise RegistryError(f"A color must be hashable, such as a text. Got {self.color!r}.")
        names = [logical for logical, _ in pairs]
        if len(set(names)) != len(names):
            raise RegistryError(f"A logical axis may be mapped once. Got logical_axes={pairs}.")

    @property
    def axes(self) -> dict[AxisName, DeviceAxes]:
        """Logical name -> device axes."""
        return dict(self.logical_axes or ())

    def _pair(self, pair):
        try:
            logical, axes = pair
        except (TypeError, ValueError) as exc:
            raise RegistryError(
                "logical_axes must be pairs (logical name, device axis). "
                f"Got {pair!r} in {self.logical_axes!r}."
            ) from exc
        axes = tuple(axes) if isinstance(axes, list) else axes
        used = (axes,) if isinstance(axes, str) else (axes or ())
        unknown = [axis for axis in used if axis not in self.mesh.axis_names]
        if unknown:
            raise RegistryError(
                f"logical_axes maps {logical!r} to {axes!r}, but the TaskMesh has the axes "
                f"{self.mesh.axis_names}."
            )
        return logical, axes


def dict_items(pairs):
    """Iterates a mapping's items, or the pairs themselves."""
    if not isinstance(pairs, Iterable):
        raise RegistryError(
            f"logical_axes must be a dict or pairs (logical name, device axis). Got {pairs!r}."
        )
    return pairs.items() if hasattr(pairs, "items") else pairs


@dataclass(frozen=True)
class Form:
    """What an entry says of its tasks beside the devices, for a callback that returns only those.

    Attributes:
      name: The name of the tasks.
      shape: The axes of their submeshes; None: those of what the callback returns.
      device_axes: Their names, without a shape.
      logical_axes: As in `Task`.
    """

    name: str | None = None
    shape: TaskMesh | None = None
    device_axes: tuple[AxisName, ...] | None = None
    logical_axes: tuple[tuple[AxisName, DeviceAxes], ...] | None = None

    def task(self, result: Any) -> Task:
        """Makes a task of the devices that a callback returned; a Task stays as it is.

        Raises:
          RegistryError: It returned something else.
        """
        if result is None:
            raise RegistryError("It returned nothing.")
        if isinstance(result, Task) and self != Form():
            raise RegistryError(
                "A callback that returns a Task has said everything: leave out name=, mesh=, "
                "dims=, device_axes= and logical_axes=, or return device positions."
            )
        if isinstance(result, Task):
            return result
        devices, color = _split_color(result)
        meshes = task_meshes(self.shape, devices, None, self.device_axes)
        if len(meshes) > 1:
            raise RegistryError(
                f"A callback must return as many devices as its mesh has, "
                f"{len(meshes[0].devices)}. Got {result!r}."
            )
        return Task(meshes[0], self.logical_axes, self.name, color)


def _split_color(result: Any) -> tuple[Any, Any]:
    """Takes apart what may be devices with a color: a range, its two ends, or JAX devices."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        return result, None
    devices, color = result
    if isinstance(color, tuple | list | range | np.ndarray | jax.Device):
        return result, None  # two rows of devices, or two devices
    if isinstance(devices, tuple | list) and len(devices) == 2:
        is_span = all(isinstance(end, int) for end in devices)
        return (range(*devices) if is_span else devices), color
    is_row = isinstance(devices, tuple | list | range | np.ndarray | jax.Device)
    return (devices, color) if is_row else (result, None)


@dataclass(frozen=True)
class Rotation:
    """A callback that gives one submesh after another to the names that match."""

    meshes: tuple[TaskMesh, ...]
    form: Form
    # In the order in which the scopes were seen, which is that of the program.
    seen: dict[str, int] = field(default_factory=dict, compare=False)

    def __call__(self, name: str, backprop: bool) -> Task:
        """The task of a name that matched."""
        turn = int(name) if name.isdecimal() else self.seen.setdefault(name, len(self.seen))
        mesh = self.meshes[turn % len(self.meshes)]
        return Task(mesh, self.form.logical_axes, self.form.name)
