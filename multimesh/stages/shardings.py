"""How each value lies on the devices of a submesh.

The sharding of a value that crosses tasks is decided here, not by the compiler, since the receiver
does not compile the sender. The nearest sharding constraint decides; else, a value whose leading
dimension is the rows of a microbatch is sharded as the batch is; else it is replicated.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.errors import RegistryError
from multimesh.stages.flat import FlatStep
from multimesh.stages.meshes import TaskMesh
from multimesh.stages.registry import Label
from multimesh.stages.tasks import Task

__all__ = ["Shardings", "Submesh", "resolve_spec"]

logger = logging.getLogger("multimesh")

# A logical PartitionSpec, and the label of the equation that asks for it.
Constraint = tuple[PartitionSpec, Label | None]


@dataclass(frozen=True)
class Submesh:
    """A submesh with its devices.

    Attributes:
      index: Its number.
      task_mesh: What the user registered.
      mesh: The JAX mesh.
      tasks: The registered tasks on it.
    """

    index: int
    task_mesh: TaskMesh
    mesh: Mesh
    tasks: tuple[Task, ...] = ()

    @property
    def axes(self) -> dict[str, str | tuple[str, ...] | None]:
        """Logical axis -> device axes, over all tasks of the submesh; the first task wins."""
        merged: dict[str, str | tuple[str, ...] | None] = {}
        for task in self.tasks:
            for logical, axes in task.axes.items():
                merged.setdefault(logical, axes)
        return merged

    @property
    def processes(self) -> tuple[int, ...]:
        """The ranks that own a device of the submesh, in order."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))


def resolve_spec(
    spec: Sequence, axes: dict[str, str | tuple[str, ...] | None]
) -> tuple[tuple[str, ...], ...]:
    """Translates a logical PartitionSpec into device axes.

    Args:
      spec: For each dimension a logical name, several, or None.
      axes: Logical name -> device axes; a name without an entry is replicated.

    Returns:
      For each dimension the device axes that split it. A device axis splits one dimension at most:
      the first that names it.
    """
    used: set[str] = set()
    resolved = []
    for entry in spec:
        # Anything else (None, UNCONSTRAINED) leaves the dimension whole.
        names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        split: list[str] = []
        for name in names:
            mapped = axes.get(name) if isinstance(name, str) else None
            for axis in (mapped,) if isinstance(mapped, str) else (mapped or ()):
                if axis not in used:
                    used.add(axis)
                    split.append(axis)
        resolved.append(tuple(split))
    return tuple(resolved)


class Shardings:
    """Decides the sharding of each value on each submesh; pure but for a cache and notices."""

    def __init__(
        self,
        step: FlatStep,
        submeshes: Sequence[Submesh],
        *,
        argument_names: dict[core.Var, str],
        same_as: dict[core.Var, core.Var],
        replaced: dict[core.Var, core.Var],
        fixed: dict[core.Var, NamedSharding],
        rows: int,
        batch_axis: str,
        automatic: bool = False,
        replicate_slices: bool = False,
    ):
        """Collects the constraints of a step.

        Args:
          step: The flat step.
          submeshes: All submeshes.
          argument_names: Names of arguments for errors.
          same_as: State that lies as another argument does: optimizer state as its parameter.
          replaced: State argument -> the value that takes its place, and lies as it does.
          fixed: The shardings of arguments that exist already.
          rows: The rows of one microbatch, over all shares.
          batch_axis: The logical name of the batch dimension.
          automatic: Whether arguments without a constraint are spread over their submesh.
          replicate_slices: Whether slices of the batch are replicated.
        """
        self.submeshes = submeshes
        self.names = argument_names
        self.fixed = fixed
        self.rows = rows
        self.batch_axis = batch_axis
        self.automatic = automatic
        self.replicate_slices = replicate_slices
        self.notices: set[str] = set()
        self.step = step
        self.specs: dict[core.Var, Constraint] = {}
        self._from_equations()
        for argument, constraint in step.constraints.items():
            self.specs[argument] = constraint
        for argument, model in same_as.items():
            if argument.aval.shape == model.aval.shape and model in self.specs:
                self.specs.setdefault(argument, self.specs[model])
        self._through_updates()
        self.carried: set[core.Var] = set()
        self._through_carries()
        self.sliced = {entry.inner for entry in step.slices}
        self.in_loop = {var for node in step.loop for var in node.outputs} | self.sliced
        self.arguments = set(step.arguments)
        self.batches = {entry.whole for entry in step.slices}
        self.successor_of = {new: old for old, new in replaced.items() if new not in self.arguments}
        self._carries_that_succeed()
        self.everywhere: set[core.Var] = set()

    def _from_equations(self) -> None:
        produced: dict[core.Var, Constraint] = {}
        consumed: dict[core.Var, Constraint] = {}
        for node in (*self.step.before, *self.step.loop, *self.step.after):
            if node.eqn.primitive.name == "sharding_constraint":
                constraint = (node.eqn.params["sharding"].spec, node.label)
                produced.setdefault(node.eqn.outvars[0], constraint)
                consumed.setdefault(node.eqn.invars[0], constraint)
        self.specs = {**produced, **consumed}

    def _through_updates(self) -> None:
        """Accumulators and updates lie as the state that they are combined with, leaf by leaf."""
        cohorts = _Cohorts()
        for carry in self.step.carries:
            for var in (carry.initial, carry.update, carry.final):
                cohorts.join(carry.inner, var)
        for node in self.step.after:
            for var in node.inputs:
                if all(out.aval.shape == var.aval.shape for out in node.outputs):
                    for out in node.outputs:
                        if var.aval.shape:
                            cohorts.join(var, out)
        for argument in self.step.arguments:
            if argument in self.specs:
                for var in cohorts.members(argument):
                    self.specs.setdefault(var, self.specs[argument])

    def _through_carries(self) -> None:
        """What the loop hands on lies the same wherever it is named."""
        for carry in self.step.carries:
            names = (carry.initial, carry.final, carry.inner, carry.update)
            self.carried.update(names)
            known = next((self.specs[var] for var in names if var in self.specs), None)
            if known is not None:
                self.specs.update(dict.fromkeys(names, known))

    def _carries_that_succeed(self) -> None:
        """A sum over microbatches that takes the place of an argument lies as it from the start."""
        for carry in self.step.carries:
            old = self.successor_of.get(carry.final)
            for var in (carry.inner, carry.update, carry.initial):
                if old is not None and var not in self.arguments:
                    self.successor_of.setdefault(var, old)

    def of(self, var: core.Var, submesh: int) -> NamedSharding:
        """Returns how a value lies on a submesh.

        Raises:
          RegistryError: A state argument's dimension does not divide by the devices of its axis.
        """
        var = self.successor_of.get(var, var)
        place = self.submeshes[submesh]
        if var in self.everywhere:
            return NamedSharding(place.mesh, PartitionSpec())
        if var in self.fixed and self.fixed[var].mesh == place.mesh:
            return self.fixed[var]
        if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended) and not var.aval.shape:
            return NamedSharding(place.mesh, PartitionSpec())
        if self.replicate_slices and var in self.sliced:
            return NamedSharding(place.mesh, PartitionSpec())
        spec, label = self.specs.get(var, (None, None))
        if spec is None and self.automatic and var in self.arguments - self.batches:
            return NamedSharding(place.mesh, _spread(var.aval.shape, place.mesh))
        if spec is None:
            return NamedSharding(place.mesh, self.rows_spec(var, place))
        return self.constrain(var, spec, label, submesh)

    def check(self, homes: dict[core.Var, int | None]) -> None:
        """Takes note of what is replicated, and checks that every parameter divides by its axes.

        On all ranks, and before compiling.

        Raises:
          RegistryError: One does not.
        """
        self.everywhere = {
            argument
            for argument, home in homes.items()
            if home is None and argument not in self.batches
        }
        for argument, home in homes.items():
            if home is not None:
                self.of(argument, home)

    def rows_spec(self, var: core.Var, place: Submesh) -> PartitionSpec:
        """Shards the rows of a microbatch over the axes that the batch is mapped to."""
        shape = var.aval.shape
        batched = var in self.in_loop and var not in self.carried
        if not batched or not shape or shape[0] != self.rows:
            return PartitionSpec()
        ((axes),) = resolve_spec((self.batch_axis,), place.axes)
        size = int(np.prod([place.mesh.shape[axis] for axis in axes], initial=1))
        if not axes or shape[0] % size:
            return PartitionSpec()
        return PartitionSpec(axes)

    def constrain(self, var: core.Var, spec, label: Label | None, submesh: int) -> NamedSharding:
        """Translates a constraint inside a task to the task's own mesh."""
        place = self.submeshes[submesh]
        if label is not None and label.task.mesh == place.task_mesh:
            return self._named(var, spec, label.task.axes, place)
        return self._named(var, spec, place.axes, place)

    def _named(self, var, spec, mapping, place: Submesh) -> NamedSharding:
        kept = []
        for dimension, axes in enumerate(resolve_spec(spec, mapping)):
            size = int(np.prod([place.mesh.shape[axis] for axis in axes], initial=1))
            if var.aval.shape[dimension] % size == 0:
                kept.append(axes or None)
                continue
            logical = spec[dimension]
            how = f"logical axis {logical!r} (device axis {'x'.join(axes)!r} of size {size})"
            self._does_not_divide(var, dimension, how, place)
            kept.append(None)
        return NamedSharding(place.mesh, PartitionSpec(*kept))

    def _does_not_divide(self, var, dimension: int, how: str, place: Submesh) -> None:
        task = ", ".join(dict.fromkeys(task.name or "" for task in place.tasks)).strip(", ")
        where = f"task {task!r}" if task else f"submesh {place.task_mesh.devices}"
        what = f"dimension {dimension} of size {var.aval.shape[dimension]}"
        if var in self.names and var not in self.sliced | self.step.varying:
            raise RegistryError(
                f"The parameter {self.names[var]} of shape {var.aval.shape} cannot be sharded in "
                f"{where}: {what} does not divide by the {how}. Change the layer's "
                "size, the TaskMesh, or leave the logical axis out of logical_axes."
            )
        notice = (
            f"An activation of shape {var.aval.shape} is not sharded in {where}: {what} does not "
            f"divide by the {how}."
        )
        if notice not in self.notices:
            self.notices.add(notice)
            logger.warning(notice)


def _spread(shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """All axes of a mesh on the first dimension that divides by its devices."""
    for dimension, size in enumerate(shape):
        if size and size % mesh.devices.size == 0:
            return PartitionSpec(*(None,) * dimension, mesh.axis_names)
    return PartitionSpec()


class _Cohorts:
    """Disjoint sets of values (union-find)."""

    def __init__(self):
        self.parent: dict[core.Var, core.Var] = {}
        self.sets: dict[core.Var, list[core.Var]] = {}

    def root(self, var):
        while self.parent.setdefault(var, var) is not var:
            self.parent[var] = self.parent[self.parent[var]]
            var = self.parent[var]
        self.sets.setdefault(var, [var])
        return var

    def join(self, first, second):
        first, second = self.root(first), self.root(second)
        if first is not second:
            self.parent[second] = first
            self.sets[first] += self.sets.pop(second)

    def members(self, var):
        return self.sets[self.root(var)]
