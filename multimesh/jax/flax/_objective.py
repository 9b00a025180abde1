"""The training step as plain JAX: loss, gradients over microbatches, optimizer.

Everything in this file is traced and then cut into tasks; run as it is, it computes the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from multimesh.errors import UsageError
from multimesh.jax._loop import microbatch_shapes, sum_over_microbatches
from multimesh.jax._loss import Parts, as_parts, finish, is_weighted

__all__ = ["LossFunction", "Objective", "train"]

LossFunction = Callable[..., Any]


class Objective(NamedTuple):
    """A user's loss function, with how its value is combined over microbatches."""

    function: LossFunction
    has_aux: bool
    reduction: str | None
    microbatches: int

    def parts(self, params: Any, batch: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        """Returns the total to differentiate, and `(weight, parts of the metrics)`."""
        result = self.function(params, batch)
        aux: Any = {}
        if self.has_aux:
            if not isinstance(result, tuple) or len(result) != 2 or is_weighted(result):
                raise UsageError(
                    "With has_aux=True, loss_fn must return (loss, aux), aux a dict of metrics. "
                    f"Got {type(result).__name__}."
                )
            result, aux = result
            if not isinstance(aux, Mapping):
                raise UsageError(f"aux must be a dict of metrics. Got {type(aux).__name__}.")
        loss = as_parts(result, "loss", self.reduction, self.microbatches)
        if not jnp.issubdtype(loss.total.dtype, jnp.floating):
            raise UsageError(
                f"The loss must be a floating-point number to have a gradient. "
                f"Got {loss.total.dtype}."
            )
        metrics = {
            name: as_parts(value, f"metric {name!r}", self.reduction, self.microbatches)
            for name, value in aux.items()
        }
        return loss.total, (loss.weight, metrics)

    def check_weight(self, params: Any, batch: Any) -> None:
        """Checks that a loss's weight has no gradient: the total alone is differentiated.

        Args:
          params: The parameters, or their shapes.
          batch: The shapes of one microbatch.

        Raises:
          UsageError: The weight depends on the parameters.
        """
        _, (weight, _) = jax.eval_shape(self.parts, params, batch)
        if weight is None:
            return

        def pull_back(params, batch, cotangent):
            _, pull = jax.vjp(lambda params: self.parts(params, batch)[1][0], params)
            return pull(cotangent)

        closed = jax.make_jaxpr(pull_back)(params, batch, weight)
        reached = {closed.jaxpr.invars[-1]}
        for eqn in closed.jaxpr.eqns:
            if any(not hasattr(atom, "val") and atom in reached for atom in eqn.invars):
                reached.update(eqn.outvars)
        if any(not hasattr(atom, "val") and atom in reached for atom in closed.jaxpr.outvars):
            raise UsageError(
                "The weight of a Weighted loss must not depend on the parameters: the gradient of "
                "sum / weight is taken with the weight fixed. Got one that does; wrap it in "
                "jax.lax.stop_gradient if that is meant."
            )


def train(objective: Objective, state: TrainState, batch: Any) -> tuple[Any, TrainState]:
    """The whole step as plain JAX: `batch` has its microbatches stacked in front."""
    objective.check_weight(state.params, microbatch_shapes(batch))

    def microbatch(rows):
        value_and_grad = jax.value_and_grad(
            lambda params: objective.parts(params, rows), has_aux=True
        )
        (total, (weight, metrics)), gradients = value_and_grad(state.params)
        return (Parts(total, weight), metrics, gradients), None

    (parts, metrics, gradients), _ = sum_over_microbatches(microbatch, batch)
    if parts.weight is not None:
        gradients = jax.tree.map(lambda g: (g / parts.weight).astype(g.dtype), gradients)
    aux = {name: finish(metric) for name, metric in metrics.items()}
    return (finish(parts), aux), state.apply_gradients(grads=gradients)
