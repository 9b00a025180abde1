"""`parallelize`: any function of parameters and a batch, over several submeshes."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.errors import UsageError
from multimesh.initial import make_leaves
from multimesh.jax._context import make_context
from multimesh.jax._contexts import chosen_options
from multimesh.jax._fetch import fetch, numbers
from multimesh.jax._mesh import StepMesh
from multimesh.jax._moving import is_global
from multimesh.jax._programs import Programs, shape_of, strong
from multimesh.plan import Plan
from multimesh.stages.meshes import device_positions
from multimesh.stages.trace import shapes, trace

__all__ = ["GetShardedBatch", "InitShardedParams", "ShardedFunction", "parallelize"]


def parallelize(
    fun: Callable[[Any, Any], Any],
    *,
    init_params: Callable[..., Any] | None = None,
    get_input_batch: Callable[..., Any] | None = None,
    initial_batch: Any = None,
    devices: Any = None,
) -> tuple:
    """Cuts a function into tasks, and runs each on the submesh that is registered for it.

    Nothing is traced or compiled before the shapes of the parameters and of the batch are known:
    from `initial_batch`, from functions that need no arguments, or when the functions that are
    returned are called. Collective: every rank makes the same calls in the same order.

    Args:
      fun: `(params, batch) -> results`, each a pytree of arrays: a forward pass, its
        `jax.value_and_grad`, a whole training step; it may call `multimesh.jax.microbatch`. What a
        `jax.jit` around it donates is donated.
      init_params: Makes the parameters; traced, so that each rank makes only its own. By default
        parameters are given, and only brought to their place.
      get_input_batch: Makes a batch, the same on every rank. By default batches are given.
      initial_batch: Or an example of a batch: arrays, wherever they are, or their shapes.
      devices: The devices of the program: positions in `jax.devices()`, devices, or a
        `jax.sharding.Mesh`; by default all. Without any task it is one program on all of them.

    Returns:
      `(sharded_fun, init_sharded_params, get_sharded_batch)`: a `ShardedFunction`, an
      `InitShardedParams` and a `GetShardedBatch`. With `initial_batch`, the first two.

    Raises:
      StartupError: A launcher started several ranks, but `init` was not called.
      UsageError: An argument does not fit.
    """
    for name, function in (("init_params", init_params), ("get_input_batch", get_input_batch)):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function or None. Got {function!r:.80}.")
    if not callable(fun):
        raise UsageError(f"parallelize needs a function (params, batch). Got {fun!r:.80}.")
    if initial_batch is not None and get_input_batch is not None:
        raise UsageError(
            "Give initial_batch= (an example) or get_input_batch= (a function that makes one), or "
            "neither. Got both."
        )
    if chosen_options().ignore_transforms:
        plain = fun, init_params or _identity, get_input_batch or _identity
        return plain if initial_batch is None else plain[:2]
    programs = Programs(fun, make_context(_mesh(devices)))
    known = _Known(init_params, get_input_batch, initial_batch)
    functions = ShardedFunction(programs, known), InitShardedParams(programs, known)
    return (
        functions if initial_batch is not None else (*functions, GetShardedBatch(programs, known))
    )


def _identity(value: Any) -> Any:
    return value


def _mesh(devices: Any) -> Mesh | StepMesh | None:
    if devices is None or isinstance(devices, Mesh | StepMesh):
        return devices
    positions = device_positions(devices).ravel()
    if not positions.size:
        raise UsageError("devices must name one device or more, or be left out. Got none.")
    count = len(jax.devices())
    if len({*positions}) != len(positions) or not all(0 <= each < count for each in positions):
        raise UsageError(
            f"devices must be different positions in jax.devices(), from 0 to {count - 1}. "
            f"Got {positions.tolist()}."
        )
    return Mesh(np.array([jax.devices()[each] for each in positions]), ("devices",))


class ShardedFunction:
    """`sharded_fun(params, batch)`: the function, on the submeshes of its tasks."""

    def __init__(self, programs: Programs, known: "_Known"):
        self._programs = programs
        self._known = known

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest program; None before there is one."""
        latest = self._programs.latest
        return None if latest is None else latest.step.plan

    @property
    def compile_count(self) -> int:
        """How many programs this rank compiled, for all shapes so far."""
        return self._programs.compile_count

    def __call__(self, params: Any, batch: Any) -> Any:
        """Computes the function. Collective; a new shape is planned and compiled once.

        Args:
          params: A pytree of arrays: where `init_sharded_params` or an earlier call put them, or
            anywhere else, from where they are brought to their place.
          batch: Likewise.

        Returns:
          What the function returns. Each array lies on the submesh that computes it (ranks without
          a device of it have no part of it; see `fetch`); scalars lie on all devices.

        Raises:
          UsageError: The function, the tasks or the arguments do not fit.
          RankMismatchError: The ranks were given different things.
          StallError: Another rank did not send in time.
        """
        results = self._programs.run(params, batch)
        self._known.note_call(params, batch)
        return results


class _Known:
    """What is known of the shapes before the function is called."""

    def __init__(self, init_params, get_input_batch, initial_batch):
        self.init_params = init_params
        self.get_input_batch = get_input_batch
        # None where nothing is known yet: a batch may be None itself.
        self._batch: tuple[Any] | None = None
        if initial_batch is not None:
            self._batch = (shape_of(initial_batch, "initial_batch"),)
        self._params: tuple[Any] | None = None
        self._made: Any = None

    def note_batch(self, batch: Any) -> None:
        self._batch = (strong(shape_of(batch, "batch")),)

    def note_params(self, shapes: Any) -> None:
        self._params = (strong(shapes),)

    def note_call(self, params: Any, batch: Any) -> None:
        """The function was called: its arguments say what is not known otherwise."""
        if self._batch is None:
            self.note_batch(batch)
        if self._params is None:
            self.note_params(shape_of(params, "params"))

    def batch(self) -> tuple[Any] | None:
        """The shapes of the batch, as a tuple of one; or None."""
        if self._batch is None and _needs_nothing(self.get_input_batch):
            self._made = (self.get_input_batch(),)
            self.note_batch(*self._made)
        return self._batch

    def make_batch(self, *args: Any, **kwargs: Any) -> Any:
        """A batch; the first one may have been made before, to see its shapes."""
        if self._made and not args and not kwargs:
            (batch,), self._made = self._made, None
            return batch
        batch = (self.get_input_batch or _identity)(*args, **kwargs)
        self.note_batch(batch)
        return batch

    def params(self, names: tuple[str, ...]) -> tuple[Any] | None:
        """The shapes of the parameters, as a tuple of one; or None."""
        if self._params is None and _needs_nothing(self.init_params):
            self.note_params(shapes(self.init_params, (), names))
        return self._params


def _needs_nothing(function: Callable | None) -> bool:
    """Whether a function can be called without arguments."""
    if function is None:
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it takes arguments, or does not tell
        return False
    return True


class InitShardedParams:
    """`init_sharded_params(*args)`: the parameters, each made where it is read."""

    def __init__(self, programs: Programs, known: _Known):
        self._programs = programs
        self._known = known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the parameters. Collective.

        Args:
          *args: What `init_params` takes; arrays are the same on every rank. Without `init_params`,
            the parameters themselves, which are brought to their place.
          **kwargs: Likewise.

        Raises:
          UsageError: The shapes of the batch are not known yet.
        """
        known = self._known.batch()
        if known is None:
            raise UsageError(
                "Where parameters live depends on the shapes of the batch, which are not known "
                "yet. Give initial_batch= to parallelize, or call get_sharded_batch first."
            )
        (batch,) = known
        if self._known.init_params is None:
            if len(args) != 1 or kwargs:
                raise UsageError(
                    "Without init_params=, init_sharded_params takes the parameters, and nothing "
                    f"else. Got {len(args)} arguments and {len(kwargs)} by name."
                )
            (params,) = args
            shapes = strong(shape_of(params, "params"))
            self._known.note_params(shapes)
            program = self._programs.of(shapes, batch)
            return self._programs.place(program, params, 0, "params")
        traced = _Traced(self._known.init_params, args, kwargs, self._programs)
        values = enumerate(traced.values)
        self._programs.compare_values({f"array {i} for init_params": v for i, v in values})
        self._known.note_params(traced.shapes)
        program = self._programs.of(strong(traced.shapes), batch)
        leaves = make_leaves(program.step, traced.closed(), traced.values, program.params)
        return jax.tree.unflatten(jax.tree.structure(traced.shapes), leaves)


class _Traced:
    """A call of `init_params`, as a function of the arrays in its arguments."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, programs: Programs):
        self.function = function
        context = programs.context
        self.names = context.axis_names("batch")
        leaves, self.tree = jax.tree.flatten((args, kwargs))
        self.leaves = [
            fetch(leaf) if is_global(leaf, context.group.size) else leaf for leaf in leaves
        ]
        # Anything else (a size, a flag) is part of the program.
        self.arrays = [
            index
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, np.ndarray | np.generic | jax.Array)
        ]
        self.impls = {
            index: jax.random.key_impl(self.leaves[index])
            for index in self.arrays
            if jax.dtypes.issubdtype(self.leaves[index].dtype, jax.dtypes.prng_key)
        }
        self.values = [self._value(index) for index in self.arrays]
        self.shapes = shapes(self._call, self._avals(), self.names)

    def _value(self, index: int) -> np.ndarray:
        value = np.asarray(numbers(self.leaves[index]))
        return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)

    def _avals(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.values]

    def _call(self, *values: jax.Array) -> Any:
        leaves = list(self.leaves)
        for index, value in zip(self.arrays, values, strict=True):
            impl = self.impls.get(index)
            leaves[index] = value if impl is None else jax.random.wrap_key_data(value, impl=impl)
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.function(*args, **kwargs)

    def closed(self) -> Any:
        """The traced call: from `values` to the leaves of the parameters."""
        return trace(self._call, self._avals(), self.names)


class GetShardedBatch:
    """`get_sharded_batch(*args)`: a batch, on the devices that read it."""

    def __init__(self, programs: Programs, known: _Known):
        self._programs = programs
        self._known = known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a batch, and places it. Collective.

        Args:
          *args: What `get_input_batch` takes; without one, the batch itself.
          **kwargs: Likewise.

        Returns:
          The batch, as `sharded_fun` takes it. Where the shapes of the parameters are not known
          yet, as it came: `sharded_fun` then brings it to its place.
        """
        batch = self._known.make_batch(*args, **kwargs)
        known = self._known.params(self._programs.context.axis_names("batch"))
        if known is None:
            return batch
        (params,) = known
        program = self._programs.of(params, strong(shape_of(batch, "batch")))
        return self._programs.place(program, batch, program.params, "batch")
