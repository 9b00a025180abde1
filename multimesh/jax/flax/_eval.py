"""`parallelize_eval`: a forward-only pass on the state of a training step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.jax._context import make_context
from multimesh.jax._fetch import check_target, fetch
from multimesh.jax._loop import loop_over_microbatches
from multimesh.jax._loss import as_parts, finish, is_weighted
from multimesh.jax.flax._model import Model
from multimesh.jax.flax._options import (
    batch_spec,
    check_axis,
    check_reduction,
    compare_requests,
    evaluation,
)
from multimesh.source import StepSource
from multimesh.step import Step, build_step
from multimesh.steps import Steps

__all__ = ["EvalFunction", "parallelize_eval"]


class EvalFunction:
    """A compiled forward pass: `eval_fn(state, batch) -> outputs`.

    Attributes:
      plan: The tasks, their schedule and what crosses submeshes, for the example batch.
      share: Which share of the rows this rank gives, from 0.
      num_shares: How many shares there are.
    """

    def __init__(self, steps: Steps, model: Model, trees: dict[str, Any], to: int | str):
        self._steps = steps
        self._model = model
        self._trees = trees
        self._to = to
        self.plan = steps.first.plan
        self.share = steps.first.placer.share
        self.num_shares = steps.first.shares.count

    @property
    def compile_count(self) -> int:
        """How many programs this rank compiled for the pass, for all shapes of batch so far."""
        return self._steps.compile_count

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Runs the pass. Collective; the state is only read.

        Args:
          state: A state of the training step.
          batch: A host batch in the tree of the example, or what `prepare` returned. A new shape is
            planned and compiled once.

        Returns:
          The outputs: arrays of rows in the order of the input, as NumPy arrays; what was
          `Weighted` or a scalar as one number. None on ranks that get nothing.

        Raises:
          BatchError: The batch has another tree or dtype than the example.
          StallError: Another rank did not send in time.
        """
        step = self._steps.of(batch)
        outputs, _ = step(self._model.variables(state), batch)
        fetched = fetch(outputs, self._to)
        if fetched is None:
            return None
        summed, rows = fetched
        values = {index: value[()] for index, value in summed.items()}
        values |= {index: _in_order(parts, step.shares.count) for index, parts in rows.items()}
        return jax.tree.unflatten(self._trees["tree"], [values[i] for i in sorted(values)])

    def prepare(self, batch: Any) -> Any:
        """Copies a host batch to the devices that read it, for `prefetch`."""
        return self._steps.of(batch).prepare(batch)


def _in_order(microbatches: list[np.ndarray], shares: int) -> np.ndarray:
    """Rows of `(microbatch, share, row)` to the order of the shares, one after another."""
    parts = [np.split(rows, shares) for rows in microbatches]
    return np.concatenate([part[share] for share in range(shares) for part in parts])


def parallelize_eval(
    model: nn.Module | nnx.Module | Callable[[Any, Any], Any],
    train_state: TrainState,
    mesh: Any = None,
    *,
    local_batch: Any = None,
    global_batch: Any = None,
    num_microbatches: int = 1,
    reduction: str | None = None,
    batch_axis: str = "batch",
    schedule: str = "1f1b",
    to: int | str = "all",
) -> EvalFunction:
    """Builds a forward-only pipelined pass on the state of a training step.

    Collective: every rank makes the same call. Parameters stay where the training step put them.

    Args:
      model: A Linen module (its `apply`), an NNX module (its `model(batch)`, on the numbers of the
        state), or a function `(params, batch) -> outputs`, for NNX `(model, batch)`; what that
        changes in the model (`model.eval()`) lasts for the call. Outputs are a
        pytree of arrays with the rows first, of scalars (see `reduction`) and of
        `multimesh.jax.Weighted`, which are reduced over the whole batch.
      train_state: A state of the training step.
      mesh: The mesh that `parallelize_step` returned; it brings the tasks of that step. By default
        all devices, with the tasks that are registered now.
      local_batch: An example of this process's share of a batch.
      global_batch: Or an example of a whole batch, given on every rank alike.
      num_microbatches: How many slices of the batch go through the pipeline.
      reduction: What scalars among the outputs are over their rows: "mean" or "sum".
      batch_axis: The logical name of the rows.
      schedule: The name of the schedule.
      to: "all": every rank gets the outputs. A rank: only that one does.

    Returns:
      `eval_fn(state, batch) -> outputs`.

    Raises:
      UsageError: An argument, the registry, the function or the batch does not fit.
      RankMismatchError: The ranks were given different things.
    """
    if not isinstance(train_state, TrainState):
        raise UsageError(
            "train_state must be a state of a training step. "
            f"Got {type(train_state).__name__}; parallelize_step returns one."
        )
    wrapped, function = evaluation(model, train_state)
    check_reduction(reduction)
    context = make_context(mesh)
    check_axis(batch_axis, context)
    check_target(to, context.group.size)
    spec = batch_spec(local_batch, global_batch, num_microbatches)
    compare_requests(
        context, spec, {"num_microbatches": num_microbatches, "reduction": reduction, "to": to}
    )
    tree: dict[str, Any] = {}
    variables = wrapped.variables(train_state)
    leaves = jax.tree.leaves(variables)

    def build(shape: BatchSpec) -> Step:
        source = StepSource(
            function=functools.partial(
                _evaluate, functools.partial(wrapped.evaluate, function), reduction, tree
            ),
            state=lambda rows: jax.tree.map(_aval, variables),
            companions={},
            shardings={index: _sharding(leaf) for index, leaf in enumerate(leaves)},
            spec=shape,
            local=global_batch is None,
            microbatches=min(num_microbatches, shape.rows),
            batch_axis=batch_axis,
            schedule=schedule,
            donate=False,
            check_patterns=False,
        )
        return build_step(source, context)

    return EvalFunction(Steps(build, spec), wrapped, tree, to)


def _aval(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _sharding(leaf: Any) -> NamedSharding:
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding
    raise UsageError(
        "Every parameter of train_state must lie on its submesh, as parallelize_step places it. "
        f"Got {type(leaf).__name__}."
    )


def _evaluate(
    function, reduction, trees: dict, params, batch, numbers, count: int
) -> tuple[Any, None]:
    """The whole pass as plain JAX; notes the tree of the outputs in `trees`."""
    portions = count / jax.tree.leaves(batch)[0].shape[1]

    def microbatch(carried, rows, number):
        outputs = function(params, rows)
        leaves, trees["tree"] = jax.tree.flatten(outputs, is_leaf=is_weighted)
        summed, stacked = {}, {}
        for index, leaf in enumerate(leaves):
            if is_weighted(leaf) or np.shape(leaf) == ():
                summed[index] = as_parts(leaf, f"output {index}", reduction, portions)
            else:
                stacked[index] = _rows(leaf, rows, index)
        return summed, stacked, carried

    summed, stacked, _ = loop_over_microbatches(microbatch, (), batch, numbers)
    return ({index: finish(parts) for index, parts in summed.items()}, stacked), None


def _rows(leaf: Any, batch: Any, index: int) -> Any:
    rows = jax.tree.leaves(batch)[0].shape[0]
    if leaf.shape[0] != rows:
        raise UsageError(
            f"Output {index} of shape {leaf.shape} must have the microbatch's {rows} rows first, "
            "or be a scalar or Weighted."
        )
    return leaf
