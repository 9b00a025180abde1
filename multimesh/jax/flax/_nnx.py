"""NNX models: taken apart into pure trees of numbers, and merged again where a function runs.

`params` holds the `nnx.Param`s. All other variables (BatchNorm statistics, counts and keys of
random numbers, caches) are collections named by their type, which go from microbatch to
microbatch: as if the model had been called on one after the other.
"""

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct, traverse_util
from jax.sharding import PartitionSpec

from multimesh.errors import UsageError
from multimesh.jax.flax._nnx_scopes import module_scopes, scope_name
from multimesh.jax.flax._state import MutableTrainState
from multimesh.stages.forwarding import forwarded

__all__ = ["Definition", "NnxModel", "NnxTrainState"]

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """A variable of a model without its value.

    Attributes:
      path: Where it is; a tied variable is at the first of its places.
      collection: "params" for an `nnx.Param`, else the name of the variable's type.
      spec: The logical axes that its metadata name.
      key: The implementation of a random key, which is kept as plain numbers; else None.
    """

    path: Path
    collection: str
    spec: PartitionSpec
    key: Any

    @property
    def parameter(self) -> bool:
        """Whether it is an `nnx.Param`."""
        return self.collection == "params"

    def of(self, variables: Mapping[str, Any]) -> Any:
        """Its number among collections."""
        return functools.reduce(operator.getitem, self.path, variables[self.collection])

    def number(self, value: Any) -> Any:
        """A value of the variable as a collection has it."""
        return value if self.key is None else jax.random.key_data(value)

    def update(self, old: Any, value: Any) -> Any:
        """The number of a value that a function assigned.

        Raises:
          UsageError: It has another shape or dtype than the old number.
        """
        new = self.number(value)
        before, after = (jax.tree.map(_form, number) for number in (old, new))
        if before != after:
            raise UsageError(
                "A variable must keep its shape and dtype from call to call. "
                f"Got {after} for {scope_name(self.path)}, which was {before}."
            )
        return new


@dataclass(frozen=True)
class Definition:
    """A model without its numbers.

    Attributes:
      graphdef: Its structure, for `nnx.merge`.
      leaves: Its variables.
    """

    graphdef: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, model: nnx.Module) -> "Definition":
        """The definition of a model, whose values may be tracers."""
        return cls(nnx.graphdef(model), tuple(_leaf(*item) for item in _variables(model).items()))

    def values(self, model: nnx.Module) -> dict[Path, Any]:
        """The values of a model's variables.

        Raises:
          UsageError: The model has other variables than those of this definition.
        """
        found = _variables(model)
        known = {leaf.path for leaf in self.leaves}
        # What a module sows is for looking at, and is not kept.
        new = {path for path in found if not isinstance(found[path], nnx.Intermediate)} - known
        if new or not found.keys() >= known:
            names = sorted(map(scope_name, new or known - found.keys()))
            raise UsageError(
                f"The model must keep the variables that it was made with. Got {names} "
                f"{'in addition' if new else 'no more'}: make all variables in __init__."
            )
        return {path: _value(found[path]) for path in known}

    def split(self, model: nnx.Module) -> dict[str, Any]:
        """Takes the numbers out of a model.

        Returns:
          For each collection its tree.
        """
        values = self.values(model)
        return self.arrange({leaf: leaf.number(values[leaf.path]) for leaf in self.leaves})

    def arrange(self, numbers: Mapping[Leaf, Any]) -> dict[str, Any]:
        """Arranges the numbers of some leaves as collections."""
        trees: dict[str, dict[Path, Any]] = {leaf.collection: {} for leaf in numbers}
        for leaf, number in numbers.items():
            trees[leaf.collection][leaf.path] = number
        return {name: traverse_util.unflatten_dict(tree) for name, tree in trees.items()}

    def merge(self, variables: Mapping[str, Any], *, constrain: bool = False) -> nnx.Module:
        """Makes a model of collections.

        Args:
          variables: For each collection its tree.
          constrain: Whether to say how parameters are sharded, in a trace with logical axes.
        """
        values = {}
        for leaf in self.leaves:
            value = leaf.of(variables)
            with jax.named_scope(scope_name(leaf.path[:-1])):
                if leaf.key is not None:
                    value = jax.random.wrap_key_data(value, impl=leaf.key)
                if constrain and any(leaf.spec):
                    value = jax.lax.with_sharding_constraint(value, leaf.spec)
            # A tree would be taken for a part of the model; in a variable it is one value.
            is_tree = not jax.tree_util.all_leaves([value])
            values[leaf.path] = nnx.Variable(value) if is_tree else value
        return nnx.merge(self.graphdef, traverse_util.unflatten_dict(values))


def _form(number: Any) -> str:
    return jax.typeof(number).str_short()


def _variables(model: nnx.Module) -> dict[Path, Any]:
    return dict(nnx.to_flat_state(nnx.state(model)))


def _value(leaf: Any) -> Any:
    """The numbers of a variable; a module may also hold bare arrays."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _is_same(new: Any, old: Any) -> bool:
    """Whether a value, which may be a tree, consists of the very numbers that it had."""
    new, old = jax.tree.leaves(new), jax.tree.leaves(old)
    return len(new) == len(old) and all(map(operator.is_, new, old))


def _leaf(path: Path, variable: Any) -> Leaf:
    value, spec = _value(variable), PartitionSpec()
    if isinstance(variable, nnx.Param):
        spec = nnx.get_partition_spec(variable).get_value()
    name = type(variable).__name__ if isinstance(variable, nnx.Variable) else "Array"
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return Leaf(
        path,
        "params" if isinstance(variable, nnx.Param) else name,
        spec,
        jax.random.key_impl(value) if is_key else None,
    )


class NnxTrainState(MutableTrainState):
    """The state of an NNX model.

    Attributes:
      definition: The model without its numbers.
    """

    definition: Any = struct.field(pytree_node=False, default=None)

    def model(self) -> nnx.Module:
        """Returns the model with this state's numbers.

        Its arrays lie on the devices of their stages. `fetch(state).model()` is a model on the
        host that knows nothing of stages any more.
        """
        variables = {"params": self.params, **self.collections}
        variables = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, variables
        )
        return self.definition.merge(variables)


def _call(model: nnx.Module, batch: Any) -> Any:
    return model(batch)


class NnxModel:
    """An NNX module, or a function that makes one; see `_model.Model`."""

    default = staticmethod(_call)

    def __init__(
        self,
        source: nnx.Module | Callable[[nnx.Rngs], nnx.Module] | None,
        definition: Definition | None = None,
    ):
        """Wraps a model.

        Args:
          source: The module, which is only read, or the function; None where values exist.
          definition: The definition, where it is known.
        """
        self.source: Any = source
        # That of a function is known when the function has first been traced.
        self.definition: Any = definition
        if isinstance(source, nnx.Module):
            self.definition = Definition.of(source)

    def describe(self) -> Mapping[str, Any]:
        if not isinstance(self.source, nnx.Module):
            return {}
        digest = hashlib.sha256()
        for path, value in jax.tree_util.tree_leaves_with_path(self.definition.split(self.source)):
            if not isinstance(value, jax.Array | np.ndarray | float | int):
                raise UsageError(
                    f"A model that is given as an instance must hold numbers. Got {value!r} at "
                    f"{jax.tree_util.keystr(path)}. Give the function that makes it instead."
                )
            digest.update(np.asarray(value).tobytes())
        return {"numbers of the model": digest.hexdigest()[:12]}

    def init(self, key: jax.Array, batch: Any) -> tuple[Any, dict[str, Any]]:
        model = self.source
        if not isinstance(model, nnx.Module):
            model = self.source(nnx.Rngs(key))
            if not isinstance(model, nnx.Module):
                raise UsageError(
                    "model must be a Flax module, or a function from nnx.Rngs to an nnx.Module. "
                    f"Got a function that returns {type(model).__name__}."
                )
            # The same object throughout: definitions compare by the functions they hold.
            self.definition = self.definition or Definition.of(model)
        collections = jax.tree.map(jnp.asarray, self.definition.split(model))
        return collections.pop("params", {}), collections

    def state(self, params: Any, collections: dict[str, Any], optimizer: Any) -> NnxTrainState:
        return NnxTrainState.create(
            apply_fn=None,
            params=params,
            tx=optimizer,
            collections=collections,
            definition=self.definition,
        )

    def call(
        self, function: Callable, params: Any, collections: Any, keys: Mapping, batch: Any
    ) -> tuple[Any, dict[str, Any]]:
        variables = {"params": params, **collections}
        model = self.definition.merge(variables, constrain=True)
        before = self.definition.values(model)
        with module_scopes(model):
            result = function(model, batch)
        after = self.definition.values(model)
        leaves = self.definition.leaves
        changed = [leaf for leaf in leaves if not _is_same(after[leaf.path], before[leaf.path])]
        self._check_kept([leaf for leaf in changed if leaf.parameter], function, variables, batch)
        # What was left alone stays the very number that it was, and need not be handed on.
        numbers = {leaf: leaf.of(variables) for leaf in leaves if not leaf.parameter}
        for leaf in changed:
            if not leaf.parameter:
                numbers[leaf] = leaf.update(numbers[leaf], after[leaf.path])
        return result, self.definition.arrange(numbers)

    def _check_kept(self, leaves: list[Leaf], function, variables, batch) -> None:
        """Checks that parameters with a new value have it under a new name only.

        What a function passes through `nnx.jit` or `nnx.remat` comes back as another tracer.

        Raises:
          UsageError: The function assigned a parameter.
        """
        if not leaves:
            return

        def parameters(variables, batch):
            model = self.definition.merge(variables)
            function(model, batch)
            values = self.definition.values(model)
            return [values[leaf.path] for leaf in leaves]

        flat, tree = jax.tree.flatten(variables)
        position = jax.tree.unflatten(tree, range(len(flat)))
        kept = forwarded(parameters, (variables, batch))
        expected = [(leaf, at) for leaf in leaves for at in jax.tree.leaves(leaf.of(position))]
        for (leaf, at), source in zip(expected, kept, strict=True):
            if source != at:
                raise UsageError(
                    "The optimizer alone may change an nnx.Param. Got a function that assigns "
                    f"{scope_name(leaf.path)}: make it a variable of another type."
                )

    def variables(self, state: NnxTrainState) -> Any:
        return {"params": state.params, **state.collections}

    def evaluate(self, function: Callable, variables: Any, batch: Any) -> Any:
        collections = dict(variables)
        return self.call(function, collections.pop("params"), collections, {}, batch)[0]
