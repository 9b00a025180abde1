"""The compiled programs of one function `(params, batch) -> results`, one for each shape."""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from multimesh.batch import COMPARED, BatchSpec, PlacedBatch
from multimesh.errors import UsageError
from multimesh.fingerprint import compare
from multimesh.jax._fetch import numbers
from multimesh.jax._moving import Mover, is_global
from multimesh.source import Context, StepSource
from multimesh.step import Step, build_step

__all__ = ["Program", "Programs", "shape_of", "strong"]

# The function takes its batch as an argument like any other, and slices it by itself.
_NO_BATCH = BatchSpec(jax.tree.structure(()), (), (), (), 1)


class _Arguments(NamedTuple):
    """What a program calls its state; errors name its leaves by it."""

    params: Any
    batch: Any


@dataclass(frozen=True)
class Program:
    """The function, planned and compiled for some shapes.

    Attributes:
      step: The step, whose state is `(params, batch)`.
      numbers: The numbers of the microbatches, placed.
      params: How many leaves of the state are parameters.
      names: A name of each leaf of the state, for errors.
    """

    step: Step
    numbers: PlacedBatch
    params: int
    names: tuple[str, ...]


class Programs:
    """Finds or builds the program for some shapes of parameters and batch."""

    def __init__(self, function: Callable[[Any, Any], Any], context: Context):
        """Remembers what to compute; traces nothing.

        Args:
          function: `(params, batch) -> results`.
          context: Where.
        """
        self.function = function
        self.context = context
        self.mover = Mover(context)
        self.latest: Program | None = None
        self._known: dict[Any, Program] = {}
        self._compared: Counter[str] = Counter()

    @property
    def compile_count(self) -> int:
        """How many programs this rank compiled, for all shapes so far."""
        return sum(program.step.compile_count for program in self._known.values())

    def of(self, params: Any, batch: Any) -> Program:
        """Returns the program for some arguments. Collective where their shapes are new.

        Args:
          params: A pytree of arrays or of their shapes.
          batch: Likewise.

        Raises:
          UsageError: Something in the function, the tasks or the arguments does not fit.
          RankMismatchError: The ranks do not agree.
        """
        shapes = shape_of(params, "params"), shape_of(batch, "batch")
        leaves, tree = jax.tree.flatten(shapes)
        key = tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves)
        if key not in self._known:
            self._known[key] = self._build(*shapes)
        self.latest = self._known[key]
        return self.latest

    def _build(self, params: Any, batch: Any) -> Program:
        compare(
            self.context.group,
            {"shape of the parameters": _text(params), "shape of the batch": _text(batch)},
            "Every rank gives the whole of both, in one shape.",
        )
        count = jax.tree.structure(params).num_leaves
        total = count + jax.tree.structure(batch).num_leaves
        source = StepSource(
            function=lambda state, batch, numbers, rows: (self.function(*state), None),
            state=lambda rows: _Arguments(params, batch),
            companions={},
            shardings={},
            spec=_NO_BATCH,
            local=False,
            microbatches=1,
            donate=False,
            check_patterns=False,
            varying=range(count, total),
            renews=lambda results: find_renewed(params, results),
        )
        step = build_step(source, self.context)
        names = tuple(name.removeprefix(".") for name in step.state.names)
        return Program(step, step.prepare(()), count, names)

    def place(self, program: Program, tree: Any, first: int, name: str) -> Any:
        """Brings arguments to where a program reads them.

        Args:
          program: The program.
          tree: The parameters or the batch.
          first: The number of its first leaf.
          name: Which of the two it is.

        Returns:
          The tree, of arrays as the program takes them.
        """
        shardings = program.step.state.shardings
        leaves, structure = jax.tree.flatten(tree)
        part = slice(first, first + len(leaves))
        names = program.names[part]
        self._compared[name] += 1
        if self._compared[name] <= COMPARED:
            self.compare_values(dict(zip(names, leaves, strict=True)))
        return jax.tree.unflatten(structure, self.mover.move(leaves, shardings[part], names))

    def compare_values(self, named: Mapping[str, Any]) -> None:
        """Checks that every rank gives the same numbers. Collective.

        Args:
          named: Name -> a value that is this rank's own copy, or an array of all ranks.

        Raises:
          RankMismatchError: They differ.
        """
        group = self.context.group
        if group.size > 1:
            compare(
                group,
                {name: _digest(value, group.size) for name, value in named.items()},
                "Every rank gives the same values: seed random numbers alike, and read the same "
                "rows.",
            )

    def run(self, params: Any, batch: Any) -> Any:
        """Computes the function. Collective.

        Args:
          params: A pytree of arrays, wherever they are.
          batch: Likewise.

        Returns:
          The results, each where it is computed; scalars on all devices.
        """
        program = self.of(params, batch)
        state = _Arguments(
            self.place(program, params, 0, "params"),
            self.place(program, batch, program.params, "batch"),
        )
        results, _ = program.step(state, program.numbers)
        return results


def _digest(value: Any, ranks: int) -> str:
    if is_global(value, ranks):
        return "an array of all ranks"
    value = np.ascontiguousarray(numbers(value))
    return f"numbers with the checksum {zlib.crc32(value.tobytes()):08x}"


def strong(shapes: Any) -> Any:
    """Returns the shapes of what numbers and weakly typed arrays are once they are placed."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def shape_of(tree: Any, name: str) -> Any:
    """Returns the shapes of a pytree of arrays, numbers, or shapes.

    Numbers are weakly typed, as for `jax.jit`. What is placed is not: a rank without a part of an
    array could not tell.

    Raises:
      UsageError: A leaf is none of these.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in paths:
        problem = _why_no_array(leaf)
        if problem:
            raise UsageError(f"{name}{jax.tree_util.keystr(path)} {problem}")
    return jax.tree.unflatten(structure, [_shape(leaf) for _, leaf in paths])


def _why_no_array(leaf: Any) -> str | None:
    """Says what is wrong with an argument; None where it is an array, a number or a shape."""
    if isinstance(leaf, jax.core.Tracer):
        return (
            "is being traced (by jax.jit, jax.grad or the like), but a parallelized function runs "
            "on several meshes and cannot be part of another program. Transform the function "
            "first: parallelize(jax.value_and_grad(fun))."
        )
    if isinstance(leaf, np.ndarray) and (leaf.dtype == object or leaf.dtype.kind in "USMm"):
        return f"must be an array of numbers. Got {leaf.dtype}."
    arrays = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct
    if not isinstance(leaf, arrays | bool | int | float | complex):
        return f"must be an array or a number. Got {type(leaf).__name__}."
    return None


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array):
        is_placed = isinstance(leaf.sharding, NamedSharding)
        is_weak = not is_placed and getattr(leaf, "weak_type", False)  # random keys have none
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(
        np.shape(leaf), dtype, weak_type=not isinstance(leaf, np.ndarray | np.generic)
    )


def _text(shapes: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    parts = [f"{jax.tree_util.keystr(p)} {s.dtype}{list(s.shape)}" for p, s in leaves]
    return ", ".join(part.strip() for part in parts) or "nothing"


def find_renewed(params: Any, results: Any) -> Mapping[int, int]:
    """Finds what takes the place of the parameters among the results of a function.

    That is the first part of them in the tree of the parameters, with their shapes and dtypes: the
    new parameters of a training step, or the gradients. Where there is none, each part of the
    parameters (of a pair of parameters and optimizer state, say) is looked for by itself.

    Args:
      params: The shapes of the parameters.
      results: The shapes of the results.

    Returns:
      Parameter -> result, both numbered as leaves; nothing for a part that is a single array.
    """
    found = _find_part(params, results, taken=set())
    if found is not None:
        return dict(enumerate(found))
    renewed: dict[int, int] = {}
    first = 0
    for part in jax.tree.leaves(params, is_leaf=lambda part: part is not params):
        count = len(jax.tree.leaves(part))
        found = _find_part(part, results, taken={*renewed.values()})
        renewed.update(zip(range(first, first + count), found or (), strict=False))
        first += count
    return renewed


def _find_part(part: Any, results: Any, taken: set[int]) -> range | None:
    """The leaves of the first part of the results that is like a tree, and not taken yet."""
    structure = jax.tree.structure(part)
    wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part)]
    if not wanted or jax.tree_util.treedef_is_leaf(structure):
        return None
    position = 0
    for each in jax.tree.leaves(
        results, is_leaf=lambda each: jax.tree.structure(each) == structure
    ):
        leaves = jax.tree.leaves(each)
        place = range(position, position + len(leaves))
        is_like = jax.tree.structure(each) == structure and taken.isdisjoint(place)
        if is_like and [(leaf.shape, leaf.dtype) for leaf in leaves] == wanted:
            return place
        position += len(leaves)
    return None
