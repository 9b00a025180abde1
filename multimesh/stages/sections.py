"""What the loop and the rest of a step have to do with each other, once both are opened."""

from dataclasses import replace

from jax.extend import core

from multimesh.stages.flat import SCALAR, Carry, FlatStep, Node, nbytes, replace_atom, substitute

__all__ = ["divide", "drop_unchanged", "gather_labelled", "unroll_single"]


def drop_unchanged(step: FlatStep) -> None:
    """What every microbatch hands on as it got it (a random key) is read from outside."""
    same = [carry for carry in step.carries if carry.update is carry.inner]
    _replace_carries(step, same)


def unroll_single(step: FlatStep) -> None:
    """With one microbatch nothing is carried: the loop reads what the carry starts with."""
    if step.microbatches == 1:
        _replace_carries(step, step.carries)


def _replace_carries(step: FlatStep, carries: list[Carry]) -> None:
    """Makes the loop read what some carries start with, and the rest of the step their update."""
    known = {carry.inner: carry.initial for carry in carries}
    step.loop = [substitute(node, known) for node in step.loop]
    finals = {carry.final: known.get(carry.update, carry.update) for carry in carries}
    step.after = [substitute(node, finals) for node in step.after]
    step.outputs = [replace_atom(atom, finals) for atom in step.outputs]
    step.carries = [
        replace(carry, update=replace_atom(carry.update, known))
        for carry in step.carries
        if carry not in carries
    ]


def divide(step: FlatStep) -> None:
    """Moves the outer equations that the loop waits for in front of it."""
    defined = {var for node in step.after for var in node.outputs}
    needed = {carry.initial for carry in step.carries}
    needed |= {entry.whole for entry in step.slices}
    needed |= {var for node in step.loop for var in node.inputs if var in defined}
    before = []
    for node in reversed(step.after):
        if any(var in needed for var in node.outputs):
            needed.update(node.inputs)
            before.append(node)
    first = set(map(id, before))
    step.before = before[::-1]
    step.after = [node for node in step.after if id(node) not in first]


def gather_labelled(step: FlatStep) -> None:
    """Without a microbatch loop, what the tasks compute is the only microbatch.

    That is their equations, what leads to them, and what follows from the forward pass, such as the
    value of the loss. The rest, an optimizer, stays outside.
    """
    wanted = _following_forward(step.after)
    needed: set[core.Var] = set()
    loop, after = [], []
    for node in reversed(step.after):
        is_inside = node.label is not None or node in wanted
        if is_inside or any(var in needed for var in node.outputs):
            needed.update(node.inputs)
            loop.append(node)
        else:
            after.append(node)
    step.loop, step.after = loop[::-1], after[::-1]


def _following_forward(nodes: list[Node]) -> set[Node]:
    forward: set[core.Var] = set()
    backward: set[core.Var] = set()
    found = set()
    for node in nodes:
        if node.scope.backward or any(var in backward for var in node.inputs):
            backward.update(node.outputs)
        elif node.label is not None or _follows(node, forward):
            forward.update(node.outputs)
            found.add(node)
    return found


def _follows(node: Node, forward: set[core.Var]) -> bool:
    """Whether an equation goes on with the forward pass.

    A scalar of it, such as a flag, does not make the update of a parameter part of it.
    """
    read = [nbytes(var) for var in node.inputs if var in forward]
    others = [nbytes(var) for var in node.inputs if var not in forward]
    return bool(read) and (max(read) > SCALAR or max(others, default=0) <= SCALAR)
