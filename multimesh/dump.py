"""Writes what a step became to a folder: its plan, and each task's programs."""

from collections.abc import Mapping
from pathlib import Path

from multimesh.errors import UsageError
from multimesh.fingerprint import describe_plan
from multimesh.plan import Plan
from multimesh.stages.program import Program, task_jaxpr

__all__ = ["dump_step"]


def dump_step(
    folder: str, plan: Plan, compiled: Mapping[tuple[int, int], Program], rank: int
) -> None:
    """Writes a step's plan, and the programs of which this rank is the first to have them.

    The files are `FOLDER/step-DIGEST/plan.txt` and, for each task, `TASK.jaxpr.txt` and
    `TASK.hlo.txt`, the optimized HLO; for microbatches of another size `TASK-ROWS-rows...`.

    Args:
      folder: Where; it is made if it is not there.
      plan: The plan.
      compiled: The programs of this rank, by task and variant of the plan.
      rank: This process.

    Raises:
      UsageError: The folder cannot be written.
    """
    digests = describe_plan(plan)
    topics = ("traced step", "placement", "shardings", "schedule")
    place = Path(folder).expanduser() / "-".join(
        ["step", *(digests[topic][:6] for topic in topics)]
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (place / "plan.txt").write_text(_describe(plan))
        for (_, number), program in compiled.items():
            variant = plan.variants[number]
            cut, task = variant.cut, program.task
            if rank != cut.submeshes[task.submesh].processes[0]:
                continue
            stem = task.name if number == 0 else f"{task.name}-{variant.rows}-rows"
            jaxpr, _ = task_jaxpr(task, cut.step, cut.shardings)
            (place / f"{stem}.jaxpr.txt").write_text(f"{jaxpr}\n")
            (place / f"{stem}.hlo.txt").write_text(program.text())
    except OSError as exc:
        raise UsageError(f"The dump folder {folder!r} cannot be written: {exc}") from exc


def _describe(plan: Plan) -> str:
    lines = ["submeshes"]
    for place in plan.cut.submeshes:
        names = ", ".join(task.name or "?" for task in place.tasks) or "no task"
        mesh = place.task_mesh
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        lines.append(f"  {place.index}: devices {mesh.devices}, axes {sizes}: {names}")
    lines.append("tasks")
    for task in plan.tasks:
        inputs, outputs = len(task.inputs), len(task.outputs)
        names = ", ".join({node.label.name: None for node in task.nodes if node.label}) or "no task"
        size = f"{len(task.nodes)} equations, {inputs} in, {outputs} out"
        lines.append(f"  {task.name}: {names}: {size}")
    lines.append("what crosses submeshes")
    lines += [
        f"  {bundle.name}, {bundle.nbytes} bytes, {len(bundle.microbatches)} times"
        for bundle in plan.bundles
    ]
    lines += [
        "schedule, a line for each submesh",
        *(f"  {row}" for row in plan.schedule.split("\n")),
    ]
    return "\n".join(lines) + "\n"
