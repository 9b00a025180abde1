"""Moves what does not change from microbatch to microbatch out of the loop.

A weight cast or a penalty on the parameters is computed once a step, where the parameters are.
What would grow (a broadcast of a bias) stays: recomputing it is cheaper than storing it.
"""

from dataclasses import replace

from multimesh.stages.flat import FlatStep, Node, nbytes

__all__ = ["hoist"]


def hoist(step: FlatStep) -> FlatStep:
    """Returns the step with its loop-invariant equations moved to `before`.

    Args:
      step: A flat step.

    Returns:
      A step of the same meaning. Equations that read nothing at all (iota, constants) move too:
      they belong to no section, and each task that needs one computes its own.
    """
    known = {*step.arguments, *step.constants}
    known -= {entry.whole for entry in step.slices} | step.varying
    known |= {var for node in step.before for var in node.outputs}
    literal: set = set()
    moved, kept = [], []
    for node in step.loop:
        if all(var in literal for var in node.inputs):
            literal.update(node.outputs)
            moved.append(node)
        elif all(var in known or var in literal for var in node.inputs) and _worth_moving(
            node, known
        ):
            known.update(node.outputs)
            moved.append(node)
        else:
            kept.append(node)
    return replace(step, before=[*step.before, *moved], loop=kept)


def _worth_moving(node: Node, known: set) -> bool:
    read = sum(nbytes(var) for var in node.inputs if var in known)
    written = sum(nbytes(var) for var in node.outputs)
    if node.label is not None:  # it is at home already: only a cast pays
        return node.eqn.primitive.name == "convert_element_type" and written < read
    return written <= read
