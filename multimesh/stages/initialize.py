"""Makes the state where it lives: each submesh runs only the part of `init` that it keeps.

The whole model never exists on one rank. What an initializer draws does not depend on where it
runs, since JAX's random bits do not depend on shardings.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.stages.flat import FlatStep, Node
from multimesh.stages.flatten import flatten
from multimesh.stages.partition import TaskSpec
from multimesh.stages.program import Program, compile_task
from multimesh.stages.shardings import Submesh

__all__ = ["Initializer"]


class Initializer:
    """The parts of a traced `init`."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        values: Sequence[np.ndarray],
        submeshes: Sequence[Submesh],
        homes: Sequence[int | None],
        sharding_of: Callable[[int, int], NamedSharding],
    ):
        """Prepares the parts; compiles nothing.

        Args:
          closed: The traced `init`: from key data and batch leaves to state leaves.
          values: The key data and the batch; only what is read is ever copied to a device.
          submeshes: All submeshes.
          homes: For each state leaf its submesh, None for all of them.
          sharding_of: The sharding of state leaf `i` on submesh `s`.
        """
        self.step = flatten(closed, lambda scope: None)
        self.step.constants.update(zip(self.step.arguments, values, strict=True))
        self.submeshes = submeshes
        self.homes = homes
        self.sharding_of = sharding_of

    def leaves_of(self, submesh: int) -> list[int]:
        """The state leaves that a submesh holds."""
        return [leaf for leaf, home in enumerate(self.homes) if home in (None, submesh)]

    def compile(self, submesh: int) -> Program:
        """Compiles the part of a submesh: a program without inputs that makes its leaves."""
        outputs = tuple(dict.fromkeys(self.step.outputs[i] for i in self.leaves_of(submesh)))
        nodes = _needed(self.step, outputs)
        task = TaskSpec(f"I{submesh}", submesh, "before", "once", tuple(nodes), (), outputs)
        return compile_task(task, self.step, self)

    def run(self, program: Program) -> dict[int, jax.Array]:
        """Runs a submesh's part; returns its state leaves by index."""
        values = dict(zip(program.task.outputs, program.call(), strict=True))
        return {
            leaf: values[self.step.outputs[leaf]] for leaf in self.leaves_of(program.task.submesh)
        }

    # What `compile_task` asks about shardings.

    def of(self, var: core.Var, submesh: int) -> NamedSharding:
        """The sharding of a state leaf on a submesh."""
        return self.sharding_of(self.step.outputs.index(var), submesh)

    def constrain(self, var: core.Var, spec, label, submesh: int) -> NamedSharding:
        """A constraint on a value in between: it is left whole."""
        return NamedSharding(self.submeshes[submesh].mesh, PartitionSpec())


def _needed(step: FlatStep, outputs: Sequence[core.Var]) -> list[Node]:
    """The equations that some results depend on."""
    wanted, kept = set(outputs), []
    for node in reversed(step.after):
        if any(var in wanted for var in node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]
