"""The training step as plain JAX: loss, gradients over microbatches, optimizer.

Everything in this file is traced and then cut into tasks; run as it is, it computes the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from multimesh.errors import UsageError
from multimesh.jax._loop import loop_over_microbatches, microbatch_shapes
from multimesh.jax._loss import Parts, as_parts, finish, is_weighted
from multimesh.jax.flax._model import Model

__all__ = ["LossFunction", "Objective", "train"]

LossFunction = Callable[..., Any]


class Objective(NamedTuple):
    """A user's loss function, with what it is given and how its value is combined.

    Attributes:
      model: What hands the variables to the function.
      function: `(params, batch) -> loss`, with `rngs=` and `mutable=` where there are any.
      has_aux: Whether it returns `(loss, metrics)`.
      reduction: What a scalar is over its rows.
      keys: The data of the base key of each kind of random numbers, and the keys' implementation.
    """

    model: Model
    function: LossFunction
    has_aux: bool
    reduction: str | None
    keys: Mapping[str, tuple[Any, Any]]

    def step_keys(self, step: jax.Array) -> dict[str, jax.Array]:
        """The keys of a step: `fold_in(key, step)`."""
        return {
            name: jax.random.fold_in(jax.random.wrap_key_data(data, impl=impl), step)
            for name, (data, impl) in self.keys.items()
        }

    def parts(
        self, params: Any, collections: Any, keys: Mapping, batch: Any, portions: float
    ) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        """Evaluates the loss of one microbatch.

        Returns:
          The total to differentiate, and `(weight, parts of the metrics, new collections)`.
        """
        result, updates = self.model.call(self.function, params, collections, keys, batch)
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
        loss = as_parts(result, "loss", self.reduction, portions)
        if not jnp.issubdtype(loss.total.dtype, jnp.floating):
            raise UsageError(
                f"The loss must be a floating-point number to have a gradient. "
                f"Got {loss.total.dtype}."
            )
        metrics = {
            name: as_parts(value, f"metric {name!r}", self.reduction, portions)
            for name, value in aux.items()
        }
        return loss.total, (loss.weight, metrics, updates)

    def check_weight(self, params, collections, keys, batch) -> None:
        """Checks that a loss's weight has no gradient: the total alone is differentiated.

        Args:
          params: The parameters, or their shapes.
          collections: The mutable collections.
          keys: The keys of a microbatch.
          batch: The shapes of one microbatch.

        Raises:
          UsageError: The weight depends on the parameters.
        """

        def weight_of(params, collections, keys, batch):
            return self.parts(params, collections, keys, batch, 1.0)[1][0]

        weight = jax.eval_shape(weight_of, params, collections, keys, batch)
        if weight is None:
            return

        def pull_back(params, collections, keys, batch, cotangent):
            _, pull = jax.vjp(lambda params: weight_of(params, collections, keys, batch), params)
            return pull(cotangent)

        closed = jax.make_jaxpr(pull_back)(params, collections, keys, batch, weight)
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


def train(
    objective: Objective, state: TrainState, batch: Any, numbers: jax.Array, rows: int
) -> tuple[Any, TrainState]:
    """The whole step as plain JAX.

    Args:
      objective: The loss.
      state: Parameters, optimizer state and mutable collections.
      batch: Arrays `(microbatches, rows of a microbatch, ...)`.
      numbers: int32 `(microbatches,)`: the number of each microbatch.
      rows: The rows of the batch.

    Returns:
      `((loss, metrics), new state)`.
    """
    collections = getattr(state, "collections", {})
    portions = rows / jax.tree.leaves(batch)[0].shape[1]
    keys = objective.step_keys(state.step)
    objective.check_weight(state.params, collections, keys, microbatch_shapes(batch))

    def microbatch(collections, batch, number):
        own = {name: jax.random.fold_in(key, number) for name, key in keys.items()}
        value_and_grad = jax.value_and_grad(
            lambda params: objective.parts(params, collections, own, batch, portions),
            has_aux=True,
        )
        (total, (weight, metrics, updates)), gradients = value_and_grad(state.params)
        return (Parts(total, weight), metrics, gradients), None, updates

    (parts, metrics, gradients), _, updates = loop_over_microbatches(
        microbatch, collections, batch, numbers
    )
    if parts.weight is not None:
        gradients = jax.tree.map(lambda g: (g / parts.weight).astype(g.dtype), gradients)
    gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, state.params)
    aux = {name: finish(metric) for name, metric in metrics.items()}
    loss = finish(parts)
    state = _apply_gradients(state, gradients, loss)
    if updates:
        state = state.replace(collections=updates)
    return (loss, aux), state


def _apply_gradients(state: TrainState, gradients: Any, loss: jax.Array) -> TrainState:
    """`state.apply_gradients`, but optimizers that look at the loss (`value=`) are given it."""
    optimizer = optax.with_extra_args_support(state.tx)

    def update(updates, opt_state, params):
        return optimizer.update(updates, opt_state, params, value=loss)

    told = state.replace(tx=optax.GradientTransformation(optimizer.init, update))
    return told.apply_gradients(grads=gradients).replace(tx=state.tx)
