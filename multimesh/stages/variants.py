"""The tasks of a step for microbatches of another size.

Rows that do not divide by the number of microbatches run as microbatches of two sizes: 10 rows
over 4 as 3, 3, 2, 2. The step is traced and cut once for each size. The cuts have the same tasks
and values, one for one, in other shapes: a value of one is the *twin* of one of the other. So one
schedule and one list of instructions serve both; only programs and messages exist for each size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend import core

from multimesh.errors import PlacementError
from multimesh.stages.cut import CutStep
from multimesh.stages.equality import computes_the_same

__all__ = ["Variant", "is_same_outside", "make_variant", "microbatch_sizes"]


@dataclass(frozen=True, eq=False)
class Variant:
    """A cut of a step for one size of microbatches.

    Attributes:
      cut: The cut.
      rows: Rows of one microbatch that one rank's share holds.
      twins: Value of the plan's own cut -> value of this one; those at the edges of tasks.
    """

    cut: CutStep
    rows: int
    twins: Mapping[core.Var, core.Var]


def microbatch_sizes(rows: int, microbatches: int, unit: int = 1) -> tuple[int, ...]:
    """Divides rows into microbatches as equally as can be, the larger ones first.

    Args:
      rows: Number of rows.
      microbatches: Number of microbatches, at most as many as rows.
      unit: Every size is a multiple of it, where that is possible.

    Returns:
      The sizes: at most two different ones.
    """
    if rows % unit or rows // unit < microbatches:
        unit = 1
    share, larger = divmod(rows // unit, microbatches)
    return tuple(unit * (share + (index < larger)) for index in range(microbatches))


def make_variant(cut: CutStep, other: CutStep, rows: int) -> Variant:
    """Pairs the values of two cuts of one step.

    Args:
      cut: The plan's own cut.
      other: A cut for microbatches of another size.
      rows: That size, per share.

    Returns:
      The variant.

    Raises:
      PlacementError: The step depends on the size in more than shapes.
    """
    twins: dict[core.Var, core.Var] = {}
    _pair(twins, "arguments", cut.step.arguments, other.step.arguments)
    _pair(twins, "results", cut.step.outputs, other.step.outputs)
    for kind in ("slices", "stacked"):
        mine, theirs = getattr(cut.step, kind), getattr(other.step, kind)
        _pair(twins, kind, [entry.inner for entry in mine], [entry.inner for entry in theirs])
    _pair(twins, "tasks", cut.tasks, other.tasks)
    for task, twin in zip(cut.tasks, other.tasks, strict=True):
        if (task.name, task.submesh) != (twin.name, twin.submesh):
            raise _differs(f"the tasks {task.name} and {twin.name}")
        for kind in ("inputs", "outputs"):
            _pair(twins, f"{kind} of {task.name}", getattr(task, kind), getattr(twin, kind))
    if not is_same_outside(cut, other):
        raise _differs("values outside the loop")
    return Variant(other, rows, twins)


def is_same_outside(cut: CutStep, other: CutStep) -> bool:
    """Whether two cuts of one step compute the same once a step, outside the loop."""
    outside = [
        [var for task in each.tasks if task.section != "loop" for var in task.outputs]
        for each in (cut, other)
    ]
    return len(outside[0]) == len(outside[1]) and computes_the_same(
        cut.step, other.step, zip(*outside, strict=True)
    )


def _pair(twins: dict, what: str, mine: Sequence, theirs: Sequence) -> None:
    if len(mine) != len(theirs):
        raise _differs(f"{len(mine)} and {len(theirs)} {what}")
    for value, twin in zip(mine, theirs, strict=True):
        if twins.setdefault(value, twin) is not twin:
            raise _differs(what)


def _differs(what: str) -> PlacementError:
    return PlacementError(
        "Microbatches of two sizes need a model that computes the same for both. With one row less "
        f"this step has other {what}. Choose num_microbatches so that it divides the rows."
    )
