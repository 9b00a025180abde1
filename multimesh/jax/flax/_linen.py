"""Linen models: `params` is what `init` returned, and functions get it as it is."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from multimesh.errors import UsageError
from multimesh.jax._loss import is_weighted
from multimesh.jax.flax._state import MutableTrainState

__all__ = ["LinenModel"]


class LinenModel:
    """A Linen module; see `_model.Model`."""

    def __init__(
        self,
        module: nn.Module | None,
        init_fn: Callable[[jax.Array, Any], Any] | None = None,
        kinds: tuple[str, ...] = (),
        mutable: tuple[str, ...] = (),
    ):
        """Wraps a module.

        Args:
          module: The Linen module; None where a function of the user's is all there is to call.
          init_fn: `(key, batch) -> params`, or None for `module.init`.
          kinds: The kinds of random numbers of the step: `module.init` gets a key for each.
          mutable: The collections that the module updates.
        """
        self.module: Any = module
        self.init_fn = init_fn
        self.kinds = kinds
        self.mutable = mutable
        self.default: Any = module and module.apply

    def describe(self) -> Mapping[str, Any]:
        return {"mutable": self.mutable}

    def init(self, key: jax.Array, batch: Any) -> tuple[Any, dict[str, Any]]:
        variables = self._init(key, batch)
        if not isinstance(variables, Mapping):
            raise UsageError(
                "init_fn must return a dict of parameters, as model.init does. "
                f"Got {type(variables).__name__}."
            )
        if not self.mutable:
            return variables, {}
        missing = [name for name in self.mutable if name not in variables]
        if missing:
            raise UsageError(
                f"mutable={list(self.mutable)} names {missing}, but the model's init makes only "
                f"{sorted(variables)}. Name collections that exist."
            )
        params = {name: value for name, value in variables.items() if name not in self.mutable}
        return params, {name: variables[name] for name in self.mutable}

    def _init(self, key, batch) -> Any:
        if self.init_fn is not None:
            return self.init_fn(key, batch)
        if not self.kinds:
            return self.module.init(key, batch)
        # A model that draws random numbers may do so while it is initialized.
        keys = {kind: jax.random.fold_in(key, n) for n, kind in enumerate(self.kinds, 1)}
        return self.module.init({**keys, "params": key}, batch)

    def state(self, params: Any, collections: dict[str, Any], optimizer: Any) -> TrainState:
        options = {"apply_fn": self.module.apply, "params": params, "tx": optimizer}
        if not self.mutable:
            return TrainState.create(**options)
        return MutableTrainState.create(collections=collections, **options)

    def call(
        self, function: Callable, params: Any, collections: Any, keys: Mapping, batch: Any
    ) -> tuple[Any, dict[str, Any]]:
        options: dict[str, Any] = {"rngs": dict(keys)} if keys else {}
        if not self.mutable:
            return function(params, batch, **options), {}
        options["mutable"] = list(self.mutable)
        result = function({**params, **collections}, batch, **options)
        return self._updates(result, collections)

    def _updates(self, result: Any, collections: Any) -> tuple[Any, dict[str, Any]]:
        """Splits `(result, updates)`, which Flax's `apply` returns with `mutable=`."""
        if not isinstance(result, tuple) or len(result) != 2 or is_weighted(result):
            raise UsageError(
                f"With mutable={list(self.mutable)}, loss_fn must return (loss, updates), as "
                f"model.apply(..., mutable=mutable) does. Got {type(result).__name__}."
            )
        result, updates = result
        old, new = (jax.tree.map(jnp.shape, tree) for tree in (collections, dict(updates)))
        if old != new:
            raise UsageError(
                "loss_fn must return every mutable collection, in the shapes it was given. "
                f"Got {new} for {old}."
            )
        return result, dict(updates)

    def variables(self, state: TrainState) -> Any:
        collections = getattr(state, "collections", None)
        return {**state.params, **collections} if collections else state.params

    def evaluate(self, function: Callable, variables: Any, batch: Any) -> Any:
        return function(variables, batch)
