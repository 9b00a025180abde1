"""`parallelize_step`: a training step of a Flax model over several submeshes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.jax._context import make_context
from multimesh.jax._mesh import StepMesh
from multimesh.jax.flax._objective import LossFunction, Objective, train
from multimesh.jax.flax._options import (
    batch_spec,
    check_axis,
    check_flags,
    check_reduction,
    collection_names,
    compare_requests,
    key_parts,
    make_model,
    random_keys,
)
from multimesh.jax.flax._state import Initialization, companions, counter_sharding
from multimesh.source import StepSource
from multimesh.step import Step, build_step
from multimesh.steps import Steps

__all__ = ["GlobalStep", "LocalStep", "PrepareBatch", "StepFunction", "parallelize_step"]


class LocalStep(NamedTuple):
    """What `parallelize_step` returns for a `local_batch`."""

    step_fn: "StepFunction"
    train_state: TrainState
    mesh: StepMesh
    prepare_batch: "PrepareBatch"


class GlobalStep(NamedTuple):
    """What `parallelize_step` returns for a `global_batch`: `step_fn` takes host arrays."""

    step_fn: "StepFunction"
    train_state: TrainState
    mesh: StepMesh


class StepFunction:
    """A compiled training step: `step_fn(state, batch) -> (loss, state)`.

    Attributes:
      plan: The tasks, their schedule and what crosses submeshes, for the example batch.
    """

    def __init__(self, steps: Steps, has_aux: bool):
        self._steps = steps
        self._has_aux = has_aux
        self.plan = steps.first.plan

    @property
    def compile_count(self) -> int:
        """How many programs this rank compiled for the step, for all shapes of batch so far."""
        return self._steps.compile_count

    def __call__(self, state: TrainState, batch: Any) -> tuple[Any, TrainState]:
        """Runs one step. Collective: every rank makes the same calls in the same order.

        Args:
          state: The state that `parallelize_step` or the step before returned; with `donate=True`
            it cannot be used afterwards.
          batch: What `prepare_batch` returned, or a host batch. A new shape of batch is planned
            and compiled once.

        Returns:
          `(loss, state)`, with `has_aux` `((loss, aux), state)`; loss and aux are scalars
          replicated over all devices.

        Raises:
          BatchError: The batch has another tree or dtype than the example.
          UsageError: The state is not one of this step.
          StallError: Another rank did not send in time.
        """
        (loss, aux), state = self._steps.of(batch)(state, batch)
        return ((loss, aux) if self._has_aux else loss), state

    def prepare(self, batch: Any) -> Any:
        """Copies a host batch to the devices that read it; `PrepareBatch` says more."""
        return self._steps.of(batch).prepare(batch)

    def measure(self, state: TrainState, batch: Any) -> tuple[dict[str, float], TrainState]:
        """Runs one step task by task, and takes the time of each. Collective.

        Args:
          state: As for a step.
          batch: What `prepare_batch` returned.

        Returns:
          The median seconds of each task, by name, on its slowest rank; and the new state.
        """
        seconds, _, state = self._steps.of(batch).measure(state, batch)
        return seconds, state


class PrepareBatch:
    """Places a share of a batch on the devices: `prepare_batch(local_batch)`.

    Attributes:
      share: Which share of the rows this rank must load, from 0.
      num_shares: How many shares there are.
    """

    def __init__(self, steps: Steps):
        self._steps = steps
        self.share = steps.first.placer.share
        self.num_shares = steps.first.shares.count

    def __call__(self, batch: Any) -> Any:
        """Copies a host batch to the devices that read it.

        Args:
          batch: This rank's share: NumPy arrays, JAX arrays of this process, or torch tensors on
            the CPU, in the tree of the example batch. A new shape of batch is planned and
            compiled once, by all ranks together.

        Returns:
          What `step_fn` takes; it may be used for several steps.

        Raises:
          BatchError: The batch has another tree or dtype than the example.
        """
        return self._steps.of(batch).prepare(batch)


def parallelize_step(
    model: nn.Module | nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    optimizer: Any,
    mesh: Any = None,
    *,
    local_batch: Any = None,
    global_batch: Any = None,
    loss_fn: LossFunction | None = None,
    init_fn: Callable[[jax.Array, Any], Any] | None = None,
    rng: jax.Array | None = None,
    num_microbatches: int = 1,
    reduction: str | None = None,
    has_aux: bool = False,
    batch_axis: str = "batch",
    schedule: str = "1f1b",
    donate: bool = True,
    replicate_inputs: bool = False,
    rngs: Any = None,
    mutable: Any = None,
) -> LocalStep | GlobalStep:
    """Builds a training step whose stages run on the submeshes of the registered tasks.

    Collective: every rank makes the same call. Afterwards each rank holds the parameters and
    optimizer state of its own stages, and has compiled only their tasks.

    Args:
      model: A Flax Linen module; an NNX module, which is only read; or a function that makes an
        NNX module, so that no rank ever holds all of it. It needs to know nothing of multimesh.
      optimizer: An optax gradient transformation.
      mesh: All devices of the step; by default every device along one axis.
      local_batch: An example of this process's share of a batch: a pytree of arrays, rows first.
      global_batch: Or an example of a whole batch, given on every rank alike.
      loss_fn: `(params, batch) -> loss` or, with `has_aux`, `(loss, aux)`. The loss is a scalar or
        `multimesh.jax.Weighted(sum, weight)`; `aux` a dict of such metrics. `params` is what
        `init_fn` returned. By default `model.apply`. For NNX `(model, batch) -> loss`; by default
        `model(batch)`.
      init_fn: `(key, batch) -> params`; by default `model.init`. Not for NNX.
      rng: The key for `init_fn`, or for the function's `nnx.Rngs`; by default
        `jax.random.key(42)`.
      num_microbatches: How many slices of the batch go through the pipeline one after another.
      reduction: What a scalar loss is over its rows: "mean" or "sum". Needed with several
        microbatches unless the loss is `Weighted`.
      has_aux: Whether `loss_fn` also returns metrics.
      batch_axis: The logical name of the rows in `logical_axes`.
      schedule: "1f1b", "gpipe" or "wavefront".
      donate: Whether a step may overwrite the state it is given.
      replicate_inputs: Whether every device of a stage that reads the batch gets all of it,
        whatever its task maps `batch_axis` to. A `local_batch` then is the whole batch, too.
      rngs: Random numbers of the step, such as dropout's: a dict from kind to base key. `loss_fn`
        gets `rngs=`, the keys folded with the step's number and then the microbatch's. Not for
        NNX, whose modules hold their streams.
      mutable: Names of the collections that the model updates, such as `("batch_stats",)`. They
        are kept in `train_state.collections`, outside the optimizer; each microbatch gets them as
        the one before left them. `loss_fn` gets them within `params`, with `mutable=`, and
        returns `(loss, updates)`. Not for NNX: all variables but `nnx.Param`s are kept there, by
        the name of their type, and handed on.

    Returns:
      `(step_fn, train_state, mesh, prepare_batch)`; with `global_batch` the first three. That of
      an NNX model has `train_state.model()`: the module with the numbers of the state.

    Raises:
      StartupError: A launcher started several ranks, but `init` was not called.
      UsageError: An argument, the registry, the model or the batch does not fit.
      RankMismatchError: The ranks were given different things.
    """
    _check_arguments(optimizer, loss_fn, init_fn, reduction)
    check_flags(donate=donate, replicate_inputs=replicate_inputs)
    keys = random_keys(rngs)
    first_key = key_parts(
        jax.random.key(42) if rng is None else rng,
        "rng must be a key, such as jax.random.key(0), or None. Got {}.",
    )
    wrapped = make_model(model, init_fn, tuple(keys), collection_names(mutable))
    context = make_context(mesh)
    spec = batch_spec(local_batch, global_batch, num_microbatches)
    options: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "reduction": reduction,
        "has_aux": has_aux,
        "batch_axis": batch_axis,
        "schedule": schedule,
        "donate": donate,
        "replicate_inputs": replicate_inputs,
        "kind of batch": "local_batch" if global_batch is None else "global_batch",
        "keys of rngs": {name: (data.tolist(), str(impl)) for name, (data, impl) in keys.items()},
    }
    check_axis(batch_axis, context)
    init = Initialization(wrapped, optimizer, first_key, spec, context.axis_names(batch_axis))
    options |= wrapped.describe()
    options["initial key"] = (init.data.tolist(), str(init.impl))
    compare_requests(context, spec, options)
    objective = Objective(wrapped, loss_fn or wrapped.default, has_aux, reduction, keys)

    def build(shape: BatchSpec) -> Step:
        source = StepSource(
            function=functools.partial(train, objective),
            # The state has the shapes that the example batch, of all shares, gave it.
            state=lambda rows: init.shapes(spec.rows * (rows // shape.rows)),
            companions=companions(init.shapes(spec.rows)),
            shardings=counter_sharding(init.shapes(spec.rows), context.mesh),
            spec=shape,
            local=global_batch is None,
            microbatches=min(num_microbatches, shape.rows),
            batch_axis=batch_axis,
            schedule=schedule,
            donate=donate,
            replicate_inputs=replicate_inputs,
        )
        return build_step(source, context)

    steps = Steps(build, spec)
    example = spec.flatten(local_batch if global_batch is None else global_batch)
    state = init.run(steps.first, context, example)
    step_mesh = StepMesh(context.mesh, context.registry)
    if global_batch is None:
        return LocalStep(StepFunction(steps, has_aux), state, step_mesh, PrepareBatch(steps))
    return GlobalStep(StepFunction(steps, has_aux), state, step_mesh)


def _check_arguments(optimizer, loss_fn, init_fn, reduction) -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(
            "optimizer must be an optax gradient transformation, such as optax.adam(1e-3). "
            f"Got {optimizer!r:.60}."
        )
    for name, function in (("loss_fn", loss_fn), ("init_fn", init_fn)):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function or None. Got {function!r}.")
    check_reduction(reduction)
