"""Scope paths: what an equation's name stack says about the module that it came from.

JAX wraps one component for each transformation: `transpose(jvp(Net))/layer_0/Dense_0` is the
backward pass of the scope `Net/layer_0/Dense_0`.
"""

import re
from dataclasses import dataclass

__all__ = ["LOOP_SCOPE", "SCHEDULE_SCOPE", "Scope", "parse_scope"]

# The name scope of the microbatch loop in a traced step.
LOOP_SCOPE = "multimesh.microbatches"
# A name scope inside of it that begins so says which schedule the loop is to have.
SCHEDULE_SCOPE = "schedule="

_WRAPPED = re.compile(r"[^()/]*\((.*)\)")


@dataclass(frozen=True)
class Scope:
    """Where an equation comes from.

    Attributes:
      path: Module names, outermost first, without transformation wrappers.
      backward: Whether the equation belongs to a backward pass.
    """

    path: tuple[str, ...] = ()
    backward: bool = False

    def __add__(self, inner: "Scope") -> "Scope":
        """The scope of an equation inside a call that has this scope."""
        return Scope(self.path + inner.path, self.backward or inner.backward)


def parse_scope(name_stack: str) -> Scope:
    """Parses the text form of a name stack.

    Args:
      name_stack: For example `transpose(jvp(Net))/layer_0`.

    Returns:
      The scope, with wrappers stripped and empty components dropped.
    """
    path: list[str] = []
    for component in filter(None, _split(name_stack)):
        while wrapped := _WRAPPED.fullmatch(component):
            component = wrapped.group(1)
        path.extend(filter(None, component.split("/")))
    return Scope(tuple(path), "transpose(" in name_stack)


def _split(text: str):
    """Splits at the slashes that are outside of parentheses."""
    depth = start = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]
