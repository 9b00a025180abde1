"""Submeshes, and the ways in which users say which devices they mean."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.errors import RegistryError

__all__ = [
    "AxisName",
    "TaskMesh",
    "axes_of",
    "axis_names",
    "device_positions",
    "mesh_positions",
    "task_meshes",
]

AxisName = str


@dataclass(frozen=True)
class TaskMesh:
    """A submesh: some devices, arranged along named axes.

    Two `TaskMesh`es with equal devices, names and sizes are one submesh, whoever built them.

    Attributes:
      devices: Positions in `jax.devices()` (not `device.id`), each at most once.
      axis_names: Names of the device axes.
      axis_sizes: Sizes of the device axes; their product is the number of devices.

    Raises:
      RegistryError: The devices, names and sizes do not fit together.
    """

    devices: tuple[int, ...]
    axis_names: tuple[AxisName, ...]
    axis_sizes: tuple[int, ...]

    def __init__(
        self,
        devices: Iterable[int],
        axis_names: Sequence[AxisName],
        axis_sizes: Sequence[int],
    ):
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        sizes = (axis_sizes,) if isinstance(axis_sizes, int) else tuple(axis_sizes)
        object.__setattr__(self, "devices", _positions(devices))
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "axis_sizes", tuple(int(size) for size in sizes))
        self._check()

    def _check(self):
        if not all(isinstance(name, str) for name in self.axis_names):
            raise RegistryError(f"Names of axes must be texts. Got {self.axis_names!r}.")
        if len(self.axis_names) != len(self.axis_sizes) or len(set(self.axis_names)) != len(
            self.axis_names
        ):
            raise RegistryError(
                "TaskMesh needs one distinct name for each axis size. "
                f"Got axis_names={self.axis_names} and axis_sizes={self.axis_sizes}."
            )
        if not self.devices or math.prod(self.axis_sizes) != len(self.devices):
            raise RegistryError(
                "The product of axis_sizes must be the number of devices. "
                f"Got axis_sizes={self.axis_sizes} (product {math.prod(self.axis_sizes)}) "
                f"for {len(self.devices)} devices {self.devices}."
            )

    def place(self, devices: Iterable[int]) -> "TaskMesh":
        """Returns a mesh of the same axes on other devices.

        Args:
          devices: As many positions in `jax.devices()` as this mesh has.

        Raises:
          RegistryError: The number of devices differs, or one is used twice.
        """
        return TaskMesh(devices, self.axis_names, self.axis_sizes)


def _positions(devices) -> tuple[int, ...]:
    try:
        positions = tuple(int(device) for device in devices)
    except TypeError as exc:
        raise RegistryError(
            "TaskMesh devices must be positions in jax.devices(), such as (0, 1, 2, 3). "
            f"Got {devices!r}."
        ) from exc
    repeated = sorted({device for device in positions if positions.count(device) > 1})
    if repeated:
        raise RegistryError(
            f"A TaskMesh uses each device once. Got device positions {repeated} more than once "
            f"in {positions}."
        )
    if any(device < 0 for device in positions):
        raise RegistryError(f"Device positions start at 0. Got {positions}.")
    return positions


def mesh_positions(mesh: Mesh) -> TaskMesh:
    """Returns a mesh as a TaskMesh: its devices by their positions in `jax.devices()`."""
    names = tuple(map(str, mesh.axis_names))
    return TaskMesh(device_positions(mesh.devices).flat, names, mesh.devices.shape)


def device_positions(devices: Any) -> np.ndarray:
    """Returns devices as their positions in `jax.devices()`.

    Args:
      devices: Positions or `jax.Device`s: one, a sequence, or an array.

    Returns:
      int64, in the shape that the devices came in; one dimension at least.

    Raises:
      RegistryError: Something else was given, or a device that this program does not have.
    """
    try:
        given = np.atleast_1d(np.array(devices))
    except ValueError:  # rows of different lengths
        given = np.array([None])
    if given.dtype.kind in "iu":
        return given.astype(np.int64)
    known = {device: index for index, device in enumerate(jax.devices())}
    unknown = [device for device in given.flat if not isinstance(device, jax.Device)]
    if unknown or any(device not in known for device in given.flat):
        raise RegistryError(
            "devices must be positions in jax.devices(), such as range(4), or devices of "
            f"jax.devices(). Got {devices!r:.80}."
        )
    return np.array([known[device] for device in given.flat], np.int64).reshape(given.shape)


def task_meshes(
    mesh: "TaskMesh | Mesh | None",
    devices: Any = None,
    dims: Sequence[int] | None = None,
    device_axes: Sequence[AxisName] | None = None,
) -> tuple[TaskMesh, ...]:
    """Builds submeshes from what a user says of them.

    Args:
      mesh: The submesh; or, with `devices`, the axes of each of the submeshes.
      devices: Positions in `jax.devices()` or devices. An array's shape is that of the submesh.
      dims: The sizes of the axes, where `devices` is a plain list.
      device_axes: The names of the axes; a single one may be left out, and is "devices".

    Returns:
      One submesh; or several, one after another on the devices, where there are several times as
      many devices as `mesh` or `dims` has.

    Raises:
      RegistryError: The arguments do not fit together.
    """
    if mesh is None and devices is None:
        raise RegistryError(
            "A task needs mesh= (a TaskMesh, or a jax.sharding.Mesh) or devices= (positions in "
            "jax.devices(), or devices). Got neither."
        )
    if mesh is not None and not isinstance(mesh, TaskMesh | Mesh):
        raise RegistryError(f"mesh must be a TaskMesh or a jax.sharding.Mesh. Got {mesh!r}.")
    if mesh is not None and not (dims is None and device_axes is None):
        raise RegistryError(
            "A mesh has sizes and names of its axes already: give dims= and device_axes= only with "
            f"devices=. Got dims={dims!r} and device_axes={device_axes!r} beside mesh={mesh!r}."
        )
    if mesh is not None:
        shape = mesh if isinstance(mesh, TaskMesh) else mesh_positions(mesh)
        return (shape,) if devices is None else _divide(device_positions(devices), shape)
    positions = device_positions(devices)
    return _divide(positions, axes_of(positions.shape if dims is None else dims, device_axes))


def axes_of(dims: Any, device_axes: Sequence[AxisName] | None) -> TaskMesh:
    """Axes that any devices may be put on, for `TaskMesh.place`.

    Args:
      dims: Their sizes.
      device_axes: Their names; a single one may be left out, and is "devices".

    Raises:
      RegistryError: They do not fit together.
    """
    sizes = _sizes(dims)
    return TaskMesh(range(math.prod(sizes)), _names(device_axes, sizes), sizes)


def _sizes(dims: Any) -> tuple[int, ...]:
    sizes = (dims,) if isinstance(dims, int) else tuple(dims)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise RegistryError(f"dims must be positive sizes of axes, such as (2, 2). Got {dims!r}.")
    return sizes


def axis_names(device_axes: Any) -> tuple[str, ...]:
    """Returns names of axes, of which a single one may come alone.

    Raises:
      RegistryError: They are something else.
    """
    names = (device_axes,) if isinstance(device_axes, str) else device_axes
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise RegistryError(f"device_axes must be names of axes, as texts. Got {device_axes!r}.")
    return tuple(names)


def _names(device_axes: Any, sizes: Sequence[int]) -> tuple[str, ...]:
    if device_axes is None and len(sizes) == 1:
        return ("devices",)
    names = axis_names(device_axes or ())
    if len(names) != len(sizes):
        raise RegistryError(
            f"device_axes must name each axis of the devices, whose sizes are {tuple(sizes)}. "
            f"Got {device_axes!r}."
        )
    return names


def _divide(positions: np.ndarray, shape: TaskMesh) -> tuple[TaskMesh, ...]:
    count = len(shape.devices)
    if not positions.size or positions.size % count:
        raise RegistryError(
            f"The number of devices must be that of a submesh of sizes {shape.axis_sizes}, or "
            f"several times that. Got {positions.size} devices."
        )
    return tuple(shape.place(part) for part in positions.reshape(-1, count))
