"""Compares ranks before the first step: all must have traced and planned the same.

Ranks that differ would wait for messages that never come, or compute something else without a
word. Each rank reduces what it has to short digests by topic; the error says which topic and rank.
"""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from jax.extend import core

from multimesh.errors import RankMismatchError
from multimesh.plan import Plan
from multimesh.stages.flat import is_literal
from multimesh.transport import Group

__all__ = ["compare", "describe_plan"]


def compare(group: Group, topics: Mapping[str, str], hint: str = "") -> None:
    """Checks that every rank has the same value for each topic. Collective.

    Args:
      group: The control plane.
      topics: What to compare; the same topics on every rank.
      hint: What the user should look at.

    Raises:
      RankMismatchError: On every rank alike: the first topic and rank that differ from rank 0.
    """
    if group.size == 1:
        return
    everyone = group.allgather(dict(topics), f"comparing {', '.join(topics)}")
    for topic in everyone[0]:
        for rank, theirs in enumerate(everyone):
            if theirs.get(topic) != everyone[0][topic]:
                raise RankMismatchError(
                    f"Every rank must run the same program, but the {topic} of rank {rank} differs "
                    f"from that of rank 0. Rank 0 has {everyone[0][topic]}; rank {rank} has "
                    f"{theirs.get(topic)}. {hint}".rstrip()
                )


def describe_plan(plan: Plan) -> dict[str, str]:
    """Digests a plan by topic."""
    step = plan.cut.step
    names = _Names()
    equations = [
        f"{[names[v] for v in node.outputs]}={node.eqn.primitive.name}{_params(node.eqn.params)}"
        f"{[_atom(atom, names) for atom in node.eqn.invars]}{node.scope}"
        for node in (*step.before, *step.loop, *step.after)
    ]
    constants = [np.asarray(value).tobytes() for value in step.constants.values()]
    tasks = [f"{task.name}:{[names[v] for v in task.inputs]}" for task in plan.tasks]
    return {
        "traced step": _digest(*equations),
        "closed-over constants": _digest(*constants),
        "placement": _digest(*map(str, [p.task_mesh for p in plan.cut.submeshes]), *tasks),
        "shardings": _digest(*_shardings(plan)),
        "schedule": _digest(plan.schedule, str(plan.timeline.total_order)),
    }


class _Names(dict):
    """Numbers variables in order of appearance."""

    def __missing__(self, var: core.Var) -> str:
        self[var] = f"v{len(self)}:{var.aval.str_short()}"
        return self[var]


def _atom(atom, names: _Names) -> str:
    return repr(atom.val) if is_literal(atom) else names[atom]


def _params(params) -> str:
    """Parameters whose text is the same in every process (functions print their address)."""
    plain = (int, float, str, bool, tuple, np.dtype, type(None))
    specs = {name: value.spec for name, value in params.items() if hasattr(value, "spec")}
    found = {name: value for name, value in params.items() if isinstance(value, plain)}
    return str({k: v for k, v in (found | specs).items() if " at 0x" not in repr(v)})


def _shardings(plan: Plan) -> Iterator[str]:
    """How everything that enters or leaves a task lies on its submesh."""
    of = plan.cut.shardings.of
    for task in plan.tasks:
        for var in (*task.inputs, *task.outputs):
            yield f"{task.name} {of(var, task.submesh).spec}"


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:12]
