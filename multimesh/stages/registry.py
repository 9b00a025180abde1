"""What the user says about stages: which modules run on which devices, by the modules' names.

A `Task` pairs a pattern over module scopes with a `TaskMesh` (devices by position and their axes)
and the map from logical axis names, which the model uses, to device axis names. Nothing here knows
how a step is traced or cut; a registry answers one question: which task does this scope belong to?
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from multimesh.errors import RegistryError

__all__ = [
    "Label",
    "Registry",
    "Task",
    "TaskMesh",
    "clear_tasks",
    "default_registry",
    "register_task",
]

AxisName = str
DeviceAxes = AxisName | tuple[AxisName, ...] | None


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


@dataclass(frozen=True)
class Task:
    """Where the modules of a scope run, and how their logical axes lie on the devices.

    Attributes:
      mesh: The submesh.
      logical_axes: Pairs (logical name, device axis | tuple of device axes | None). A logical name
        without an entry is replicated. None: the device axis names are the logical names.
      name: A name for plans and errors; by default the matched scope.

    Raises:
      RegistryError: A pair names a device axis that the mesh does not have, or a logical name
        appears twice.
    """

    mesh: TaskMesh
    logical_axes: tuple[tuple[AxisName, DeviceAxes], ...] | None = None
    name: str | None = None

    def __post_init__(self):
        if not isinstance(self.mesh, TaskMesh):
            raise RegistryError(f"Task.mesh must be a TaskMesh. Got {self.mesh!r}.")
        if self.logical_axes is None:
            pairs = tuple((name, name) for name in self.mesh.axis_names)
        else:
            pairs = tuple(self._pair(pair) for pair in dict_items(self.logical_axes))
        object.__setattr__(self, "logical_axes", pairs)
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
    return pairs.items() if hasattr(pairs, "items") else pairs


Callback = Callable[[str, bool], Task]


@dataclass(frozen=True)
class Entry:
    """One registered pattern with its task or callback."""

    pattern: str
    task: Task | None
    callback: Callback | None

    @property
    def depth(self) -> int:
        """How many scope components the pattern spans."""
        return self.pattern.count("/") + 1

    def match(self, path: tuple[str, ...]) -> re.Match | None:
        """Matches the end of a scope path, whole components only."""
        tail = path[-self.depth :]
        return re.fullmatch(self.pattern, "/".join(tail)) if len(tail) == self.depth else None


@dataclass(frozen=True)
class Label:
    """The answer of a registry: the task of a scope, under a name."""

    name: str
    task: Task


@dataclass
class Registry:
    """Registered patterns, in order of registration.

    Attributes:
      entries: One for each pattern.
    """

    entries: list[Entry] = field(default_factory=list)

    def add(self, pattern: str, task: Task | None = None, callback: Callback | None = None) -> None:
        """Registers a pattern; see `register_task`."""
        if (task is None) == (callback is None):
            raise RegistryError(
                f"register_task({pattern!r}) needs exactly one of task= and callback=. "
                f"Got {'both' if task is not None else 'neither'}."
            )
        if task is not None and not isinstance(task, Task):
            raise RegistryError(f"register_task({pattern!r}): task must be a Task. Got {task!r}.")
        if callback is not None and not callable(callback):
            raise RegistryError(
                f"register_task({pattern!r}): callback must be callable. Got {callback!r}."
            )
        try:
            re.compile(pattern)
        except (re.error, TypeError) as exc:
            raise RegistryError(
                f"register_task needs a regular expression over module names. "
                f"Got {pattern!r}: {exc}."
            ) from exc
        entry = Entry(pattern, task, callback)
        if any(other.pattern == pattern and other != entry for other in self.entries):
            raise RegistryError(
                f"The pattern {pattern!r} is already registered with another task. "
                "Call clear_tasks() first to start over."
            )
        if entry not in self.entries:
            self.entries.append(entry)

    def snapshot(self) -> "Registry":
        """Returns a copy that later registrations do not change."""
        return Registry(list(self.entries))

    def label(self, path: tuple[str, ...], backprop: bool) -> tuple[Label, Entry] | None:
        """Finds the task of a scope: the innermost component that matches wins.

        Args:
          path: The components of the scope, outermost first.
          backprop: Whether the backward pass of the scope is meant.

        Returns:
          The label and the entry that gave it, or None where nothing matches.

        Raises:
          RegistryError: Two patterns match the same component, or a callback returns something
            that is not a Task.
        """
        for end in range(len(path), 0, -1):
            found = [(e, m) for e in self.entries if (m := e.match(path[:end]))]
            if len(found) > 1:
                patterns = ", ".join(repr(entry.pattern) for entry, _ in found)
                raise RegistryError(
                    f"The scope {'/'.join(path[:end])!r} is matched by two patterns: {patterns}. "
                    "Make them disjoint."
                )
            if found:
                entry, match = found[0]
                name = match.group(1) if match.re.groups and match.group(1) else match.group(0)
                return self._resolve(entry, name, backprop), entry
        return None

    def _resolve(self, entry: Entry, name: str, backprop: bool) -> Label:
        task = entry.callback(name, backprop) if entry.callback is not None else entry.task
        if not isinstance(task, Task):
            raise RegistryError(
                f"The callback of the pattern {entry.pattern!r} must return a Task. "
                f"Got {task!r} for name={name!r}, backprop={backprop}."
            )
        return Label(task.name or name, task)

    def describe(self) -> tuple[str, ...]:
        """Returns one line for each entry, equal on every rank that registered the same."""
        return tuple(
            f"{entry.pattern!r}: {entry.task if entry.task else 'callback'}"
            for entry in self.entries
        )


default_registry = Registry()


def register_task(pattern: str, task: Task | None = None, callback: Callback | None = None) -> None:
    r"""Says on which submesh the modules of a scope run.

    Args:
      pattern: A regular expression. It must match one component of a module's path fully
        (`layer_1` is not `layer_10`); a pattern with `/` must match the end of a path. Where
        several components match, the innermost wins.
      task: The task of every scope that matches.
      callback: Or a function `(name, backprop) -> Task`, called with the pattern's first group
        (without a group, the matched text) and whether the backward pass is meant.

    Raises:
      RegistryError: The pattern is no regular expression, not exactly one of task and callback is
        given, or the pattern is already registered with another task.
    """
    default_registry.add(pattern, task, callback)


def clear_tasks() -> None:
    """Forgets every registered task. Steps that are already built keep theirs."""
    default_registry.entries.clear()
