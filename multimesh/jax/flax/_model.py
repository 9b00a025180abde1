"""What a step has to know of a model. Linen and NNX differ in it, and in nothing else."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from flax.training.train_state import TrainState

__all__ = ["Model"]


class Model(Protocol):
    """How a model's variables are made, divided, handed to a user's function and kept."""

    # What a step computes where the user gives no `loss_fn`.
    default: Callable[..., Any]

    def describe(self) -> Mapping[str, Any]:
        """What must be the same on every rank, by topic; nothing is traced."""

    def init(self, key: jax.Array, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Makes the variables; traced.

        Returns:
          The parameters, and by name the collections that the model updates.
        """

    def state(self, params: Any, collections: dict[str, Any], optimizer: Any) -> TrainState:
        """Puts what `init` made into a training state."""

    def call(
        self, function: Callable, params: Any, collections: Any, keys: Mapping, batch: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Calls a user's function, such as `loss_fn`, on one microbatch; traced.

        Returns:
          Its result, and the collections as it leaves them.
        """

    def variables(self, state: TrainState) -> Any:
        """The part of a state that evaluation reads."""

    def evaluate(self, function: Callable, variables: Any, batch: Any) -> Any:
        """Calls a user's function on one microbatch, and forgets what it updates; traced."""
