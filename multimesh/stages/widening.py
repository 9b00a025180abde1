"""Lets the smaller value cross: an equation that makes more than it reads moves to its reader.

Before, for a cast between two modules:                After:

    layer_0:   a = dot x w      bfloat16 on stage 0        a = dot x w       on stage 0
    (no task)  b = convert a    float32  on stage 0        b = convert a     on stage 1
    layer_1:   c = dot b v               on stage 1        c = dot b v       on stage 1

Only equations without a task of their own move: what a module returns crosses as it is.
"""

from collections import defaultdict

from jax.extend import core

from multimesh.stages.flat import FlatStep, Node, nbytes
from multimesh.stages.placement import EXPENSIVE, Placement

__all__ = ["widen_after_crossing"]


def widen_after_crossing(step: FlatStep, placement: Placement, section: str) -> None:
    """Moves equations to their only reading submesh where less crosses then.

    Args:
      step: The flat step.
      placement: The places of the section and of the loop, which are changed.
      section: "before" or "loop".
    """
    nodes = step.loop if section == "loop" else step.before
    users: defaultdict[core.Var, list[Node]] = defaultdict(list)
    for node in (*step.before, *step.loop):
        for var in node.inputs:
            users[var].append(node)
    kept = {carry.update for carry in step.carries} | {carry.initial for carry in step.carries}
    kept |= {entry.inner for entry in step.stacked} | set(step.outputs)
    kept |= {var for node in step.after for var in node.inputs}
    for node in reversed(nodes):
        if node.label is None and not kept & set(node.outputs):
            _move(node, placement, users)


def _move(node: Node, placement: Placement, users) -> None:
    home = placement.nodes[node]
    readers = [user for var in node.outputs for user in users[var]]
    targets = {placement.nodes.get(user) for user in readers}
    if home is None or node.eqn.primitive.name in EXPENSIVE or len(targets) != 1:
        return
    (target,) = targets
    read = [var for var in dict.fromkeys(node.inputs) if placement.values.get(var) is not None]
    if target in (home, None) or any(placement.values[var] != home for var in read):
        return
    more = [var for var in read if all(placement.nodes.get(u) != target for u in users[var])]
    if sum(map(nbytes, more)) < sum(map(nbytes, node.outputs)):
        stages = (placement.stage[user.outputs[0]] for user in readers if user.outputs)
        placement.put(node, target, min(stages, default=0))
