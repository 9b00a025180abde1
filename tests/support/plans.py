"""The only place that looks inside a built step, so that tests survive a change of names.

Tasks are named by their phases and their submesh: "F0", "FB1", "B0".
"""

import re

import jax

__all__ = [
    "accumulators",
    "compilations",
    "devices_of",
    "loop_crossings",
    "loop_tasks",
    "loop_values",
    "moved_values",
    "programs",
    "remats",
    "task_names",
    "update_rounds",
]


def loop_tasks(step_fn):
    """The tasks of one microbatch, sorted."""
    return sorted(_label(task) for task in step_fn.plan.tasks if task.section == "loop")


def task_names(step_fn):
    """The names that the tasks of one microbatch go by, sorted."""
    return sorted(task.name for task in step_fn.plan.tasks if task.section == "loop")


def update_rounds(step_fn):
    """For each submesh, the number of tasks after the loop."""
    rounds = {}
    for task in step_fn.plan.tasks:
        if task.section == "after":
            rounds[task.submesh] = rounds.get(task.submesh, 0) + 1
    return rounds


def loop_values(step_fn):
    """Shape of every value that crosses submeshes once for each of several microbatches."""
    return _shapes(bundle for bundle in step_fn.plan.bundles if len(bundle.microbatches) > 1)


def loop_crossings(step_fn):
    """What crosses for each microbatch: {(task, target submesh): ["float32[4,8]", ...]}."""
    crossings = {}
    for bundle in step_fn.plan.bundles:
        if len(bundle.microbatches) > 1:
            route = step_fn.plan.tasks[bundle.task].name, bundle.target
            crossings.setdefault(route, []).extend(var.aval.str_short() for var in bundle.vars)
    return crossings


def moved_values(step_fn):
    """Shape of every value that crosses submeshes at all."""
    return _shapes(step_fn.plan.bundles)


def programs(step_fn):
    """Names of the tasks' programs: (those of this process's devices, all), sorted."""
    submeshes = step_fn.plan.cut.submeshes
    me = jax.process_index()
    names = [(task.name.replace(".", "_"), task.submesh) for task in step_fn.plan.tasks]
    mine = [name for name, submesh in names if me in submeshes[submesh].processes]
    return sorted(mine), sorted(name for name, _ in names)


def compilations(step_fn):
    """The number of programs that this process has compiled for the step."""
    return step_fn.compile_count


def accumulators(step_fn):
    """The dtypes of what the loop adds up."""
    return {str(carry.inner.aval.dtype) for carry in step_fn.plan.cut.step.carries}


def devices_of(array):
    """Positions in `jax.devices()` of a global array's devices."""
    return {jax.devices().index(device) for device in array.sharding.device_set}


def remats(step_fn, name):
    """The number of rematerialized computations in a task."""
    (task,) = (task for task in step_fn.plan.tasks if task.name == name)
    names = [node.eqn.primitive.name for node in task.nodes]
    return names.count("remat2") + names.count("checkpoint")


def _label(task):
    phases = "".join(re.findall("[A-Z]", task.name))
    return f"{phases}{task.submesh}"


def _shapes(bundles):
    return [var.aval.shape for bundle in bundles for var in bundle.vars]
