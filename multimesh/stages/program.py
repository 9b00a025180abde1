"""Compiles a task: its equations as one XLA program on the devices of its submesh."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from multimesh._compat import jaxprs_in_params, new_jaxpr, without_mesh
from multimesh.stages.flat import FlatStep
from multimesh.stages.partition import TaskSpec
from multimesh.stages.registry import Label
from multimesh.stages.shardings import Submesh

__all__ = ["Program", "compile_task", "donations"]


class Layouts(Protocol):
    """What a compiler needs to know of shardings; see `shardings.Shardings`."""

    submeshes: Sequence[Submesh]

    def of(self, var: core.Var, submesh: int) -> NamedSharding:
        """How a value lies on a submesh."""

    def constrain(
        self, var: core.Var, spec: PartitionSpec, label: Label | None, submesh: int
    ) -> NamedSharding:
        """A constraint of the model, on the task's own mesh."""


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled task.

    Attributes:
      task: What it computes.
      call: The executable: takes the task's inputs, returns a list of its outputs.
      text: Returns its optimized HLO.
      donated: Positions of the inputs whose memory the outputs take over.
    """

    task: TaskSpec
    call: Callable[..., list[jax.Array]]
    donated: tuple[int, ...]
    text: Callable[[], str]


def compile_task(
    task: TaskSpec, step: FlatStep, shardings: Layouts, donate: Collection[core.Var] = ()
) -> Program:
    """Compiles one task for the devices of its submesh.

    Args:
      task: The task.
      step: The step that it is cut from, for the constants.
      shardings: The sharding of each value.
      donate: Inputs that nothing reads afterwards.

    Returns:
      The executable program.
    """
    jaxpr, constants = task_jaxpr(task, step, shardings)
    donated = donations(task, step, shardings, donate)
    places = [shardings.of(var, task.submesh) for var in task.inputs]
    results = [shardings.of(var, task.submesh) for var in task.outputs]
    function = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))
    jitted = jax.jit(
        _named(function, task.name),
        in_shardings=places,
        out_shardings=results,
        donate_argnums=donated,
    )
    avals = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=place)
        for var, place in zip(task.inputs, places, strict=True)
    ]
    compiled = jitted.lower(*avals).compile()
    return Program(task, compiled, donated, compiled.as_text)


def _named(function, name: str):
    def task(*args):
        return function(*args)

    # The name under which profilers and XLA dumps show the program.
    task.__name__ = task.__qualname__ = name.replace(".", "_")
    return task


def task_jaxpr(task: TaskSpec, step: FlatStep, shardings: Layouts) -> tuple[core.Jaxpr, list[Any]]:
    """Builds a task's jaxpr, its sharding constraints on the task's own mesh.

    Returns:
      The jaxpr and the values of its constants.
    """
    eqns = [
        _place_constraints(node.eqn, node.label, task.submesh, shardings) for node in task.nodes
    ]
    read = dict.fromkeys([*(var for node in task.nodes for var in node.inputs), *task.outputs])
    constants = [var for var in read if var in step.constants]
    jaxpr = new_jaxpr(constants, list(task.inputs), list(task.outputs), eqns, task.name)
    return jaxpr, [step.constants[var] for var in constants]


def _place_constraints(eqn, label: Label | None, submesh: int, shardings: Layouts):
    if eqn.primitive.name == "sharding_constraint":
        spec = eqn.params["sharding"].spec
        sharding = shardings.constrain(eqn.invars[0], spec, label, submesh)
        mesh = shardings.submeshes[submesh].mesh.abstract_mesh
        params = {**eqn.params, "sharding": sharding, "context_mesh": mesh}
        return without_mesh(eqn.replace(params=params))

    def inside(value):
        if isinstance(value, core.ClosedJaxpr):
            return value.replace(jaxpr=inside(value.jaxpr))
        if isinstance(value, core.Jaxpr):
            eqns = [_place_constraints(each, label, submesh, shardings) for each in value.eqns]
            return value.replace(eqns=eqns)
        if type(value) is tuple:
            return tuple(map(inside, value))
        return value

    eqn = without_mesh(eqn)
    if not any(True for _ in jaxprs_in_params(eqn.params)):
        return eqn
    return eqn.replace(params={name: inside(value) for name, value in eqn.params.items()})


def donations(
    task: TaskSpec, step: FlatStep, shardings: Layouts, allowed: Collection[core.Var]
) -> tuple[int, ...]:
    """Chooses the inputs to donate: those that an output of the same form can take over.

    XLA warns of every donated input that it cannot use. State comes first, so that all of it is
    taken over and its next use is an error; a gradient beside it is freed anyway.
    """

    def form(var):
        return var.aval.shape, var.aval.dtype, shardings.of(var, task.submesh)

    free = [form(var) for var in task.outputs]
    chosen = []
    for position, var in sorted(
        enumerate(task.inputs), key=lambda item: item[1] not in step.arguments
    ):
        if var in allowed and form(var) in free:
            free.remove(form(var))
            chosen.append(position)
    return tuple(sorted(chosen))
