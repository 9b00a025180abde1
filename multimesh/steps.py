"""The steps of one program for batches of different shapes: each is built when its shape comes.

A smaller last batch, or longer sequences, are other shapes: they are traced, planned and compiled
once, and found again afterwards. The state passes from one to the other as it is.
"""

from collections.abc import Callable
from typing import Any

from multimesh.batch import BatchSpec, PlacedBatch, Placer
from multimesh.errors import UsageError
from multimesh.step import Step

__all__ = ["Steps"]


class Steps:
    """Finds or builds the step for a batch.

    Attributes:
      first: The step for the example batch.
    """

    def __init__(self, build: Callable[[BatchSpec], Step], spec: BatchSpec):
        """Builds the step for the example batch. Collective.

        Args:
          build: Builds the step for a shape.
          spec: The structure of the example batch.
        """
        self.first = build(spec)
        self._build = build
        self._spec = spec
        self._by_shapes = {spec.shapes: self.first}
        self._by_placer: dict[Placer, Step] = {self.first.placer: self.first}

    @property
    def compile_count(self) -> int:
        """How many programs this rank compiled for all of them."""
        return sum(step.compile_count for step in self._by_shapes.values())

    def of(self, batch: Any) -> Step:
        """Returns the step for a batch. Collective where its shape is new.

        Args:
          batch: A host batch, or one that was placed for one of these steps.

        Raises:
          BatchError: The batch has another tree or other dtypes than the example.
          UsageError: The batch was placed for a step of another program.
        """
        if isinstance(batch, PlacedBatch):
            if batch.owner not in self._by_placer:
                raise UsageError(
                    "This batch was prepared for another step. Use the prepare_batch that "
                    "parallelize_step returned together with this step_fn."
                )
            return self._by_placer[batch.owner]
        spec = self._spec.like(batch)
        if spec.shapes not in self._by_shapes:
            self._add(spec)
        return self._by_shapes[spec.shapes]

    def _add(self, spec: BatchSpec) -> None:
        step = self._build(spec)
        for name, ours, theirs in zip(
            step.state.names, self.first.state.shardings, step.state.shardings, strict=True
        ):
            if ours != theirs:
                raise UsageError(
                    f"For a batch of shapes {spec.shapes} the step wants {name} on {theirs}, but "
                    f"it is on {ours}: the model's modules depend on the batch. Use batches of one "
                    "shape, or a step of its own for each."
                )
        self._by_shapes[spec.shapes] = step
        self._by_placer[step.placer] = step
