"""A step as one flat list of equations, before, in and after the microbatch loop: the data.

`flatten` makes it; the passes after it take a `FlatStep` and return another.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend import core

from multimesh.stages.registry import Label
from multimesh.stages.scopes import Scope

__all__ = [
    "SCALAR",
    "Atom",
    "Carry",
    "FlatStep",
    "Node",
    "Slice",
    "Stacked",
    "is_literal",
    "nbytes",
    "replace_atom",
    "substitute",
]

Atom = Any  # core.Var | core.Literal

SCALAR = 64  # bytes: losses, norms, counters and the like


@dataclass(frozen=True, eq=False)
class Node:
    """An equation with what its scope says.

    Attributes:
      eqn: The equation; its variables are unique in the step.
      scope: Where it comes from.
      label: The task of that scope, if any.
      recomputed: Whether it belongs to the backward pass of a remat that spans several tasks.
    """

    eqn: core.JaxprEqn
    scope: Scope
    label: Label | None
    recomputed: bool = False

    @property
    def inputs(self) -> list[core.Var]:
        """The variables that the equation reads, without literals."""
        return [atom for atom in self.eqn.invars if not is_literal(atom)]

    @property
    def outputs(self) -> list[core.Var]:
        """The variables that the equation defines."""
        return list(self.eqn.outvars)


@dataclass(frozen=True)
class Carry:
    """A value that the loop hands from one microbatch to the next."""

    inner: core.Var
    initial: core.Var
    update: core.Var
    final: core.Var


@dataclass(frozen=True)
class Slice:
    """A value that the loop reads one slice of for each microbatch; `whole` is a step argument."""

    inner: core.Var
    whole: core.Var


@dataclass(frozen=True)
class Stacked:
    """A value of every microbatch that the step returns; `whole` has them stacked."""

    inner: core.Var
    whole: core.Var


@dataclass
class FlatStep:
    """A step with calls inlined and the microbatch loop opened.

    Attributes:
      arguments: The step's inputs.
      outputs: The step's results.
      constants: Arrays that the traced function closed over.
      before: Equations that the loop waits for.
      loop: Equations of one microbatch.
      after: The other equations.
      carries, slices, stacked: What enters and leaves the loop.
      microbatches: How often the loop runs.
      constraints: The first sharding constraint on each argument: a logical PartitionSpec and the
        label of the equation.
      varying: Arguments that stand for a batch, where there is no loop to slice one.
      schedule: The schedule that the loop asks for, if it does.
    """

    arguments: list[core.Var]
    outputs: list[core.Var] = field(default_factory=list)
    constants: dict[core.Var, Any] = field(default_factory=dict)
    before: list[Node] = field(default_factory=list)
    loop: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    stacked: list[Stacked] = field(default_factory=list)
    microbatches: int = 1
    constraints: dict[core.Var, tuple[Any, Label | None]] = field(default_factory=dict)
    varying: frozenset[core.Var] = frozenset()
    schedule: str | None = None


def is_literal(atom: Atom) -> bool:
    """Whether an atom is a literal rather than a variable."""
    return isinstance(atom, core.Literal)


def nbytes(atom: Atom) -> int:
    """The size of an atom's value in bytes."""
    aval = atom.aval
    return aval.size * getattr(aval.dtype, "itemsize", 8)


def substitute(node: Node, known: dict[core.Var, Atom]) -> Node:
    """Renames a node's inputs."""
    if not any(var in known for var in node.inputs):
        return node
    invars = [replace_atom(atom, known) for atom in node.eqn.invars]
    return replace(node, eqn=node.eqn.replace(invars=invars))


def replace_atom(atom: Atom, known: dict[core.Var, Atom]) -> Atom:
    """Looks an atom up in a renaming."""
    return atom if is_literal(atom) else known.get(atom, atom)
