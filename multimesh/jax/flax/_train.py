"""`parallelize_step`: a training step of a Flax model over several submeshes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState

from multimesh.batch import BatchSpec
from multimesh.errors import UsageError
from multimesh.jax.flax._mesh import StepMesh
from multimesh.jax.flax._objective import LossFunction, Objective, train
from multimesh.jax.flax._options import (
    batch_spec,
    check_reduction,
    compare_requests,
    make_context,
)
from multimesh.stages.initialize import Initializer
from multimesh.stages.trace import shapes, trace
from multimesh.state import assemble
from multimesh.step import Context, Step, StepSource, build_step

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
      plan: The tasks, their schedule and what crosses submeshes.
      compile_count: How many programs this rank compiled for the step.
    """

    def __init__(self, step: Step, has_aux: bool):
        self._step = step
        self._has_aux = has_aux
        self.plan = step.plan
        self.compile_count = step.compile_count

    def __call__(self, state: TrainState, batch: Any) -> tuple[Any, TrainState]:
        """Runs one step. Collective: every rank makes the same calls in the same order.

        Args:
          state: The state that `parallelize_step` or the step before returned; with `donate=True`
            it cannot be used afterwards.
          batch: What `prepare_batch` returned, or a host batch.

        Returns:
          `(loss, state)`, with `has_aux` `((loss, aux), state)`; loss and aux are scalars
          replicated over all devices.

        Raises:
          BatchError: The batch has another tree, shape or dtype than the example.
          UsageError: The state is not one of this step.
          StallError: Another rank did not send in time.
        """
        (loss, aux), state = self._step(state, batch)
        return ((loss, aux) if self._has_aux else loss), state

    def measure(self, state: TrainState, batch: Any) -> tuple[dict[str, float], TrainState]:
        """Runs one step task by task, and takes the time of each. Collective.

        Args:
          state: As for a step.
          batch: What `prepare_batch` returned.

        Returns:
          The median seconds of each task, by name, on its slowest rank; and the new state.
        """
        seconds, _, state = self._step.measure(state, batch)
        return seconds, state


class PrepareBatch:
    """Places a share of a batch on the devices: `prepare_batch(local_batch)`.

    Attributes:
      share: Which share of the rows this rank must load, from 0.
      num_shares: How many shares there are.
    """

    def __init__(self, step: Step):
        self._step = step
        self.share = step.placer.share
        self.num_shares = step.shares.count

    def __call__(self, batch: Any) -> Any:
        """Copies a host batch to the devices that read it.

        Args:
          batch: This rank's share, with the shapes of the example batch.

        Returns:
          What `step_fn` takes; it may be used for several steps.

        Raises:
          BatchError: The batch has another tree, shape or dtype than the example.
        """
        return self._step.prepare(batch)


def parallelize_step(
    model: nn.Module,
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
    rngs: Any = None,
    mutable: Any = None,
) -> LocalStep | GlobalStep:
    """Builds a training step whose stages run on the submeshes of the registered tasks.

    Collective: every rank makes the same call. Afterwards each rank holds the parameters and
    optimizer state of its own stages, and has compiled only their tasks.

    Args:
      model: A Flax module; it needs to know nothing of multimesh.
      optimizer: An optax gradient transformation.
      mesh: All devices of the step; by default every device along one axis.
      local_batch: An example of this process's share of a batch: a pytree of arrays, rows first.
      global_batch: Or an example of a whole batch, given on every rank alike.
      loss_fn: `(params, batch) -> loss` or, with `has_aux`, `(loss, aux)`. The loss is a scalar or
        `multimesh.jax.Weighted(sum, weight)`; `aux` a dict of such metrics. `params` is what
        `init_fn` returned. By default `model.apply`.
      init_fn: `(key, batch) -> params`; by default `model.init`.
      rng: The key for `init_fn`; by default `jax.random.key(42)`.
      num_microbatches: How many slices of the batch go through the pipeline one after another.
      reduction: What a scalar loss is over its rows: "mean" or "sum". Needed with several
        microbatches unless the loss is `Weighted`.
      has_aux: Whether `loss_fn` also returns metrics.
      batch_axis: The logical name of the rows in `logical_axes`.
      schedule: "1f1b" or "gpipe".
      donate: Whether a step may overwrite the state it is given.
      rngs: Reserved for random numbers in the step; not supported yet.
      mutable: Reserved for mutable collections; not supported yet.

    Returns:
      `(step_fn, train_state, mesh, prepare_batch)`; with `global_batch` the first three.

    Raises:
      StartupError: A launcher started several ranks, but `init` was not called.
      UsageError: An argument, the registry, the model or the batch does not fit.
      RankMismatchError: The ranks were given different things.
    """
    for name, value in (("rngs", rngs), ("mutable", mutable)):
        if value is not None:
            raise UsageError(f"{name}= is not supported yet. Got {value!r}; leave it out.")
    _check_arguments(model, optimizer, loss_fn, init_fn, reduction)
    context = make_context(mesh)
    spec = batch_spec(local_batch, global_batch, num_microbatches)
    options: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "reduction": reduction,
        "has_aux": has_aux,
        "batch_axis": batch_axis,
        "schedule": schedule,
        "donate": donate,
        "kind of batch": "local_batch" if global_batch is None else "global_batch",
    }
    init = _Init(model, optimizer, init_fn, rng, spec, context.axis_names(batch_axis))
    options["initial key"] = (init.data.tolist(), str(init.impl))
    compare_requests(context, spec, options)
    objective = Objective(loss_fn or model.apply, has_aux, reduction, num_microbatches)
    source = StepSource(
        function=lambda state, batch: train(objective, state, batch),
        state=init.shapes,
        companions=_companions(init.shapes(spec.rows)),
        shardings={},
        spec=spec,
        local=global_batch is None,
        microbatches=num_microbatches,
        batch_axis=batch_axis,
        schedule=schedule,
        donate=donate,
    )
    step = build_step(source, context)
    example = spec.flatten(local_batch if global_batch is None else global_batch)
    state = init.run(step, context, example)
    step_mesh = StepMesh(context.mesh, context.registry)
    if global_batch is None:
        return LocalStep(StepFunction(step, has_aux), state, step_mesh, PrepareBatch(step))
    return GlobalStep(StepFunction(step, has_aux), state, step_mesh)


def _check_arguments(model, optimizer, loss_fn, init_fn, reduction) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a Flax linen module instance. Got {model!r}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(f"optimizer must be an optax gradient transformation. Got {optimizer!r}.")
    for name, function in (("loss_fn", loss_fn), ("init_fn", init_fn)):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function or None. Got {function!r}.")
    check_reduction(reduction)


class _Init:
    """The traced initialization of a `TrainState`."""

    def __init__(self, model, optimizer, init_fn, rng, spec: BatchSpec, names):
        key = jax.random.key(42) if rng is None else rng
        self.typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        self.impl = jax.random.key_impl(key) if self.typed else None
        self.data = np.asarray(jax.random.key_data(key) if self.typed else key)
        self.init_fn = init_fn or model.init
        self.model = model
        self.optimizer = optimizer
        self.spec = spec
        self.names = names
        self._shapes: dict[int, TrainState] = {}

    def state(self, data: jax.Array, leaves: list) -> TrainState:
        """Makes the state, from the key's data and the batch's leaves."""
        key = jax.random.wrap_key_data(data, impl=self.impl) if self.typed else data
        params = self.init_fn(key, jax.tree.unflatten(self.spec.tree, leaves))
        state = TrainState.create(apply_fn=self.model.apply, params=params, tx=self.optimizer)
        return state.replace(step=jnp.asarray(state.step, jnp.int32))

    def _arguments(self, rows: int) -> tuple:
        leaves = [
            jax.ShapeDtypeStruct((rows, *shape[1:]), dtype)
            for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True)
        ]
        return jax.ShapeDtypeStruct(self.data.shape, self.data.dtype), leaves

    def shapes(self, rows: int) -> TrainState:
        """The shapes of the state for a batch of some rows; runs nothing."""
        if rows not in self._shapes:
            self._shapes[rows] = shapes(self.state, self._arguments(rows), self.names)
        return self._shapes[rows]

    def run(self, step: Step, context: Context, example: list[np.ndarray]) -> TrainState:
        """Makes the state's leaves, each where it lives."""
        shares = step.shares.count
        if shares > 1:  # an initializer may read the batch, so it gets all of it
            gathered = step.shares.gather(context.group, example)
            example = [np.concatenate(leaf) for leaf in zip(*gathered, strict=True)]
        state = step.state
        closed = trace(self.state, self._arguments(self.spec.rows * shares), self.names)
        initializer = Initializer(
            closed,
            [self.data, *example],
            state.submeshes,
            state.homes,
            lambda leaf, submesh: state.local_sharding(leaf, submesh),
        )
        made = {place: initializer.run(initializer.compile(place)) for place in state.mine}
        leaves = []
        for index, home in enumerate(state.homes):
            if home is None:
                parts = {place: leaves_of[index] for place, leaves_of in made.items()}
                leaves.append(assemble(parts, state.everywhere))
            elif home in made:
                leaves.append(made[home][index])
            else:
                leaves.append(state.absent(index))
        return jax.tree.unflatten(state.tree, leaves)


def _companions(state: TrainState) -> dict[int, int]:
    """Optimizer state that repeats the tree of the parameters: leaf -> parameter.

    A leaf belongs to the parameter whose path is the end of its own: `.opt_state[0].mu['w']` to
    `.params['w']`.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    root = jax.tree_util.GetAttrKey("params")
    parameters = {
        tuple(map(str, path[1:])): index
        for index, path in enumerate(paths)
        if path[0] == root and len(path) > 1
    }
    found = {}
    for index, path in enumerate(paths):
        if path[0] == root:
            continue
        keys = tuple(map(str, path))
        matches = (parameters.get(keys[start:]) for start in range(1, len(keys)))
        match = next((m for m in matches if m is not None), None)
        if match is not None:
            found[index] = match
    return found
