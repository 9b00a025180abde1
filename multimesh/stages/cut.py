"""Runs the passes over a traced step, in the order that the package names them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from multimesh.errors import RegistryError
from multimesh.stages.accumulate import split_accumulators
from multimesh.stages.counters import count_by_number
from multimesh.stages.flat import FlatStep
from multimesh.stages.flatten import flatten
from multimesh.stages.hoist import hoist
from multimesh.stages.labels import Labels
from multimesh.stages.meshes import TaskMesh, mesh_positions
from multimesh.stages.options import DEFAULTS, Options
from multimesh.stages.partition import Need, TaskSpec, partition
from multimesh.stages.placement import Placement, place_loop, place_outside, reading_stages
from multimesh.stages.registry import Label, Registry
from multimesh.stages.rematerialize import split_rematerialization
from multimesh.stages.shardings import Shardings, Submesh
from multimesh.stages.tasks import Task
from multimesh.stages.widening import widen_after_crossing

__all__ = ["CutStep", "Signature", "cut"]


@dataclass(frozen=True)
class Signature:
    """What the caller knows of a traced step's flattened arguments and results.

    Attributes:
      names: A name of each argument, for errors.
      number: The argument with the numbers of the microbatches.
      replaced: State argument -> the result that replaces it.
      companions: Optimizer state -> the parameter that it belongs to.
      shardings: Arguments that exist already; one on the whole mesh is replicated.
      rows: The rows of one microbatch over all shares.
      batch_axis: The logical name of the rows.
      replicate_inputs: Whether every device of a stage that reads the batch gets all of it.
      varying: Arguments that stand for a batch; a step with a batch of its own has none.
      scattered: Whether results stay on the submesh that computes them, but for scalars.
    """

    names: Sequence[str]
    number: int
    replaced: Mapping[int, int] = field(default_factory=dict)
    companions: Mapping[int, int] = field(default_factory=dict)
    shardings: Mapping[int, NamedSharding] = field(default_factory=dict)
    rows: int = 0
    batch_axis: str = "batch"
    replicate_inputs: bool = False
    varying: Sequence[int] = ()
    scattered: bool = False


@dataclass(frozen=True)
class CutStep:
    """A step cut into tasks.

    Attributes:
      step: The flat step that the tasks' equations come from.
      submeshes: Every submesh, in order of the forward pass; the last may hold idle devices.
      placement: Where each value is.
      homes: The submesh of each argument, None for replicated.
      tasks: The tasks, in an order that respects their dependencies.
      results: The submesh where the caller gets each result, None for all of them.
      shardings: The sharding of each value on each submesh.
    """

    step: FlatStep
    submeshes: tuple[Submesh, ...]
    placement: Placement
    homes: dict[core.Var, int | None]
    tasks: tuple[TaskSpec, ...]
    results: dict[core.Var, int | None]
    shardings: Shardings


def cut(
    closed: core.ClosedJaxpr,
    registry: Registry,
    mesh: Mesh,
    signature: Signature,
    *,
    check_patterns: bool = True,
    keep_loop: bool = False,
    options: Options = DEFAULTS,
) -> CutStep:
    """Cuts a traced step into tasks.

    Args:
      closed: The step, traced with logical axes.
      registry: The registered tasks; empty: the step is one task on `mesh`.
      mesh: All devices of the step.
      signature: What the caller knows of the arguments.
      check_patterns: Whether every pattern must match a scope of this step.
      keep_loop: Whether all that the loop computes stays in it, for a step where it depends on the
        rows of a microbatch.
      options: What the user chose of how it is cut.

    Returns:
      The step, cut.

    Raises:
      RegistryError: A pattern matches nothing, two match one scope, or a task's devices do not
        exist or lie outside of `mesh`.
      PlacementError: The step cannot be cut.
    """
    labels = Labels(registry, mesh, closed, options.ignore_transforms)
    step = _flat(closed, labels, signature, keep_loop)
    if check_patterns:
        labels.check_patterns()
    elif signature.scattered:
        labels.check_any()
    fixed = {step.arguments[index]: known for index, known in signature.shardings.items()}
    homes = {var: _home(known, mesh) for var, known in fixed.items()}
    submeshes = _submeshes(step, labels, mesh, [place for place in homes.values() if place])
    index_of = {place.task_mesh: place.index for place in submeshes}
    known = {var: None if place is None else index_of[place] for var, place in homes.items()}

    def submesh_of(label: Label) -> int:
        return index_of[label.task.mesh]

    placement = place_loop(step, submesh_of, default=0, recompute=options.recomputation)
    widen_after_crossing(step, placement, "loop")
    step = split_accumulators(step, placement)
    known.update(_companion_homes(step, placement, signature, known))
    replaced = {
        step.arguments[argument]: step.outputs[result]
        for argument, result in signature.replaced.items()
    }
    places = place_outside(
        step, placement, submesh_of, known, replaced, default=0, may_gather=signature.scattered
    )
    widen_after_crossing(step, placement, "before")
    needs = _needs(step, placement, places, replaced, len(submeshes))
    shardings = Shardings(
        step,
        submeshes,
        argument_names=dict(zip(step.arguments, signature.names, strict=True)),
        same_as={step.arguments[a]: step.arguments[b] for a, b in signature.companions.items()},
        replaced=replaced,
        fixed=fixed,
        rows=signature.rows,
        batch_axis=signature.batch_axis,
        automatic=options.autoshard,
        replicate_slices=signature.replicate_inputs,
    )
    shardings.check(places)
    tasks = partition(step, placement, needs, options).tasks
    results = _results(step, placement, signature, places, replaced)
    return CutStep(step, tuple(submeshes), placement, places, tasks, results, shardings)


def _flat(
    closed: core.ClosedJaxpr, labels: Labels, signature: Signature, keep_loop: bool
) -> FlatStep:
    """The step as one list of equations, in the form that can be placed."""
    step = flatten(closed, labels, signature.number)
    step.varying = frozenset(step.arguments[index] for index in signature.varying)
    if not keep_loop:
        step = count_by_number(step, step.arguments[signature.number])
    step = split_rematerialization(step)
    return hoist(step) if step.slices and not keep_loop else step


def _results(step, placement, signature, places, replaced):
    """Where the caller gets each result: in place of an argument, where it is computed, or all."""
    results = dict.fromkeys(step.outputs)
    if signature.scattered:
        results = {var: placement.values.get(var) if var.aval.shape else None for var in results}
    results.update({result: places[argument] for argument, result in replaced.items()})
    return results


def _home(sharding, mesh):
    """Where an array that exists already lies: on a submesh, or None for on all devices."""
    is_everywhere = sharding.mesh == mesh and sharding.is_fully_replicated
    return None if is_everywhere else mesh_positions(sharding.mesh)


def _submeshes(step: FlatStep, labels: Labels, mesh: Mesh, more: list[TaskMesh]) -> list[Submesh]:
    """Collects the submeshes: forward pass first, then the others, then idle devices."""
    tasks: dict[TaskMesh, dict[Task, None]] = {}
    nodes = (*step.loop, *step.before, *step.after)
    labelled = [(node.scope.backward, node.label) for node in nodes if node.label is not None]
    for _, label in sorted(labelled, key=operator.itemgetter(0)):
        tasks.setdefault(label.task.mesh, {})[_named(label)] = None
    for task_mesh in more:
        tasks.setdefault(task_mesh, {})
    devices = jax.devices()
    allowed = mesh_positions(mesh).devices
    for task_mesh, found in tasks.items():
        _check_devices(task_mesh, found, len(devices), allowed)
    idle = [
        position
        for position in allowed
        if not any(position in task_mesh.devices for task_mesh in tasks)
    ]
    if idle:
        tasks[TaskMesh(idle, ("idle",), (len(idle),))] = {}
    return [
        Submesh(
            index,
            task_mesh,
            Mesh(
                np.array([devices[position] for position in task_mesh.devices]).reshape(
                    task_mesh.axis_sizes
                ),
                task_mesh.axis_names,
            ),
            tuple(found),
        )
        for index, (task_mesh, found) in enumerate(tasks.items())
    ]


def _named(label: Label) -> Task:
    return replace(label.task, name=label.name)


def _check_devices(task_mesh: TaskMesh, tasks, count: int, allowed) -> None:
    names = ", ".join(repr(task.name) for task in tasks) or "the state"
    beyond = [position for position in task_mesh.devices if position >= count]
    if beyond:
        raise RegistryError(
            f"The task {names} uses device positions {beyond}, but there are {count} devices "
            f"(positions 0 to {count - 1}). Change its TaskMesh, or ask init for more devices."
        )
    outside = [position for position in task_mesh.devices if position not in allowed]
    if outside:
        raise RegistryError(
            f"The task {names} uses device positions {outside}, which are not in the mesh given "
            f"to the step (positions {sorted(allowed)}). Give a mesh of all devices of the tasks."
        )


def _companion_homes(step, placement, signature: Signature, known) -> dict:
    """Optimizer state lives with its parameter, which lives with its first reader in the loop."""
    readers = reading_stages([*step.before, *step.loop], placement)
    homes = {}
    for argument, parameter in signature.companions.items():
        stages = readers[step.arguments[parameter]]
        home = known.get(step.arguments[parameter], min(stages)[1] if stages else None)
        if home is not None and step.arguments[argument] not in known:
            homes[step.arguments[argument]] = home
    return homes


def _needs(step, placement, homes, replaced, submeshes: int) -> list[Need]:
    """Lists the floating values that a submesh must compute for the caller or the loop."""
    arguments = {result: argument for argument, result in replaced.items()}
    elsewhere = {*step.arguments, *(entry.whole for entry in step.stacked)}
    needs = []
    for result in dict.fromkeys(step.outputs):
        if result in elsewhere or placement.values.get(result) is not None:
            continue
        home = homes.get(arguments[result]) if result in arguments else None
        places = range(submeshes) if home is None else [home]
        needs += [Need(result, place, "after") for place in places]
    for carry in step.carries:
        if placement.values.get(carry.initial) is None:
            needs.append(Need(carry.initial, placement.values[carry.inner], "before"))
    return needs
