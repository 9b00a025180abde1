"""What the user says about stages: which modules run on which devices, by the modules' names.

A `Task` pairs a pattern over module scopes with a `TaskMesh` (devices by position and their axes)
and the map from logical axis names, which the model uses, to device axis names. Nothing here knows
how a step is traced or cut; a registry answers one question: which task does this scope belong to?
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from multimesh.errors import RegistryError
from multimesh.stages.meshes import AxisName, axes_of, axis_names, task_meshes
from multimesh.stages.tasks import Form, Rotation, Task, dict_items

__all__ = [
    "Label",
    "Registry",
    "clear_tasks",
    "default_registry",
    "register_task",
]

Callback = Callable[[str, bool], Any]


@dataclass(frozen=True)
class Entry:
    """One registered pattern with its task or callback."""

    pattern: str
    task: Task | None
    callback: Callback | None
    form: Form = field(default_factory=Form)

    def match(self, path: tuple[str, ...]) -> re.Match | None:
        """Matches the end of a scope path: whole components, and as few as can be."""
        most = self.pattern.count("/") + 1  # no alternative spans more
        for depth in range(1, min(most, len(path)) + 1):
            if found := re.fullmatch(self.pattern, "/".join(path[-depth:])):
                return found
        return None


@dataclass(frozen=True)
class Label:
    """The answer of a registry: the task of a scope, under a name.

    Attributes:
      name: For plans and errors.
      task: The task.
      scope: What tells tasks of one name apart, where functions bring their own.
    """

    name: str
    task: Task
    scope: str = ""


@dataclass
class Registry:
    """Registered patterns, in order of registration.

    Attributes:
      entries: One for each pattern.
      explicit: The tasks of functions that bring their own, each with what the function is known
        by: name scope -> (task, origin).
    """

    entries: list[Entry] = field(default_factory=list)
    explicit: dict[str, tuple[Task, Any]] = field(default_factory=dict)

    def add(
        self,
        pattern: str,
        task: Task | None = None,
        callback: Callback | None = None,
        form: Form | None = None,
    ) -> None:
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
            if not isinstance(pattern, str):
                raise TypeError("it must be a text")
            re.compile(pattern)
        except (re.error, TypeError) as exc:
            raise RegistryError(
                f"register_task needs a regular expression over module names. "
                f"Got {pattern!r}: {exc}."
            ) from exc
        entry = Entry(pattern, task, callback, form or Form())
        if any(other.pattern == pattern and other != entry for other in self.entries):
            raise RegistryError(
                f"The pattern {pattern!r} is already registered with another task. "
                "Call clear_tasks() first to start over."
            )
        if entry not in self.entries:
            self.entries.append(entry)

    def add_explicit(self, task: Task, origin: Any) -> str:
        """Registers the task of a function that brings its own.

        Args:
          task: The task; it has a name.
          origin: What the function is known by.

        Returns:
          The name scope in which the function's equations must be: the same for the same function
          with an equal task.
        """
        stem = "task." + re.sub(r"[/()]", "_", task.name or "")
        number = 0
        found = task, origin
        while self.explicit.setdefault(scope := f"{stem}.{number}", found) != found:
            number += 1
        return scope

    def axis_names(self) -> set[AxisName]:
        """The names of axes, of devices and logical ones, that are known before a callback's."""
        tasks = [entry.task for entry in self.entries if entry.task]
        tasks += [task for task, _ in self.explicit.values()]
        names: set[AxisName] = set()
        for task in tasks:
            names.update(task.mesh.axis_names, task.axes)
        for entry in self.entries:
            callback = entry.callback
            form = callback.form if isinstance(callback, Rotation) else entry.form
            meshes = callback.meshes if isinstance(callback, Rotation) else (form.shape,)
            names.update(*(mesh.axis_names for mesh in meshes if mesh), form.device_axes or ())
            names.update(dict(form.logical_axes or ()))
        return names

    def snapshot(self) -> "Registry":
        """Returns a copy that later registrations of patterns do not change.

        A function may bring its task as late as when it is traced; its scope is its own.
        """
        return Registry(list(self.entries), self.explicit)

    def label(self, path: tuple[str, ...], backprop: bool) -> tuple[Label, Entry | None] | None:
        """Finds the task of a scope: the innermost component that matches wins.

        Args:
          path: The components of the scope, outermost first.
          backprop: Whether the backward pass of the scope is meant.

        Returns:
          The label and the entry that gave it (None: the task of a function); or None where
          nothing matches.

        Raises:
          RegistryError: Two patterns match the same component, or a callback returns something
            that is not a Task.
        """
        for end in range(len(path), 0, -1):
            if (known := self.explicit.get(path[end - 1])) is not None:
                return Label(known[0].name or path[end - 1], known[0], path[end - 1]), None
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
        task: Any = entry.task
        if entry.callback is not None:
            result = entry.callback(name, backprop)
            try:
                task = entry.form.task(result)
            except RegistryError as exc:
                raise RegistryError(
                    f"The callback of the pattern {entry.pattern!r} must return a Task, or device "
                    f"positions. Got {result!r} for name={name!r}, backprop={backprop}: {exc}"
                ) from exc
        return Label(task.name or name, task)

    def describe(self) -> tuple[str, ...]:
        """Returns one line for each entry, equal on every rank that registered the same."""
        return tuple(
            f"{entry.pattern!r}: {entry.task if entry.task else 'callback'}"
            for entry in self.entries
        )


default_registry = Registry()


def register_task(
    pattern: str,
    task: Task | None = None,
    callback: Callback | None = None,
    *,
    name: str | None = None,
    mesh: Any = None,
    devices: Any = None,
    dims: Sequence[int] | None = None,
    device_axes: Sequence[AxisName] | None = None,
    logical_axes: Any = None,
) -> None:
    r"""Says on which submesh the modules of a scope run.

    The task is given as `task`, by `callback`, or by what it is made of: `mesh`, or `devices`.

    Args:
      pattern: A regular expression. It must match one component of a module's path fully
        (`layer_1` is not `layer_10`); a pattern with `/` must match the end of a path. Where
        several components match, the innermost wins.
      task: The task of every scope that matches.
      callback: Or a function `(name, backprop) -> Task`, called with the pattern's first group
        (without a group, the matched text) and whether the backward pass is meant. It may also
        return device positions, or `(range(start, stop), color)`: their axes are those of `mesh` or
        `dims`, or a single one.
      name: The name of the task.
      mesh: A `TaskMesh` or a `jax.sharding.Mesh`. With more `devices` than it has, the scopes that
        match rotate over them: its axes are put on one part of the devices after another, by the
        number that the pattern's first group is, or in the order in which their names were seen.
        Scopes of one name are one.
      devices: Positions in `jax.devices()`, or devices; an array has the shape of the submesh.
      dims: The shape of the submesh, where `devices` is a list.
      device_axes: The names of the axes of `devices`.
      logical_axes: As in `Task`.

    Raises:
      RegistryError: The pattern is no regular expression, the arguments do not fit together, or the
        pattern is already registered with another task.
    """
    parts = {"name": name, "mesh": mesh, "devices": devices, "dims": dims}
    parts |= {"device_axes": device_axes, "logical_axes": logical_axes}
    given = [part for part, value in parts.items() if value is not None]
    if task is not None and given:
        raise RegistryError(
            f"register_task({pattern!r}): a Task says already what {', '.join(given)} would. "
            "Give one or the other."
        )
    form = Form()
    if given and callback is not None:
        form = _form_of_callback(pattern, name, mesh, devices, dims, device_axes, logical_axes)
    elif given:
        meshes = task_meshes(mesh, devices, dims, device_axes)
        task = Task(meshes[0], logical_axes, name)
        if len(meshes) > 1:
            callback = Rotation(meshes, Form(name, logical_axes=task.logical_axes))
            task = None
    default_registry.add(pattern, task, callback, form)


def _form_of_callback(pattern, name, mesh, devices, dims, device_axes, logical_axes) -> Form:
    if devices is not None:
        raise RegistryError(
            f"register_task({pattern!r}): a callback says which devices; devices= would, too. "
            "Give one of them."
        )
    names = None if device_axes is None else axis_names(device_axes)
    shape = axes_of(dims, names) if dims is not None else None
    if mesh is not None:
        (shape,) = task_meshes(mesh, None, dims, names)
    axes = None
    if logical_axes is not None:
        pairs = dict_items(logical_axes)
        axes = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in pairs)
    if shape is not None:
        axes = Task(shape, axes).logical_axes if axes else axes
    return Form(name, shape, None if shape else names, axes)


def clear_tasks() -> None:
    """Forgets every registered pattern. Steps that are already built keep their tasks."""
    default_registry.entries.clear()
