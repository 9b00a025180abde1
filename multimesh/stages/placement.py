"""Which submesh each equation runs on.

Labelled equations run where their task does. The others are placed so that little moves:

  in the loop   an equation follows its operands that change with the microbatch: the latest stage
                in the forward pass, the earliest in the backward pass. Parameters do not vote:
                moving them once a step is cheap.
  outside       an equation goes to the submesh that its operands are on. A small value that mixes
                submeshes (a global norm) is computed by each task that needs it.

An equation that reads only literals, the batch or such small values *floats*: it has no place of
its own, and every task that needs it computes it. `None` stands for floating in this module.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jax.extend import core

from multimesh.errors import PlacementError
from multimesh.stages.flat import SCALAR, FlatStep, Node, nbytes
from multimesh.stages.registry import Label

__all__ = ["EXPENSIVE", "SMALL", "Placement", "place_loop", "place_outside"]

SMALL = 4096  # bytes: values up to this size may be computed on several submeshes

# Too dear to repeat in each task that reads the result.
EXPENSIVE = {"dot_general", "conv_general_dilated", "gather", "scan", "while", "sort", "cumsum"}


@dataclass
class Placement:
    """Where everything is.

    Attributes:
      nodes: The submesh of each equation, by the equation's node; None floats.
      values: The submesh of each value; None for values that float or are replicated.
      stage: The forward level of a value: how many changes of submesh lie before it.
      backward: The values that belong to the backward pass.
      mixed: Small values that depend on several submeshes, and what small follows from them.
      joins: Equations that add up what several submeshes have accumulated, once a step.
    """

    nodes: dict[Node, int | None] = field(default_factory=dict)
    values: dict[core.Var, int | None] = field(default_factory=dict)
    stage: dict[core.Var, int] = field(default_factory=dict)
    backward: set[core.Var] = field(default_factory=set)
    mixed: set[core.Var] = field(default_factory=set)
    joins: set[Node] = field(default_factory=set)

    def put(self, node: Node, submesh: int | None, stage: int = 0) -> None:
        """Records the place of a node and of what it computes."""
        self.nodes[node] = submesh
        for var in node.outputs:
            self.values[var] = submesh
            self.stage[var] = stage


def place_loop(
    step: FlatStep, submesh_of: Callable[[Label], int], default: int, recompute: bool = True
) -> Placement:
    """Places the loop's equations.

    Args:
      step: The flat step, hoisted.
      submesh_of: The submesh index of a label.
      default: The submesh of equations that nothing decides.
      recompute: Whether what is cheap may float.

    Returns:
      The places of the loop's nodes and values.
    """
    # What reads only the batch has no level of its own: that of its submesh is known afterwards.
    first = _follow(step, submesh_of, {}, recompute)[0]
    placement, undecided = _follow(step, submesh_of, _arrivals(step, first), recompute)
    _place_by_readers(step, undecided, placement, default)
    for carry in step.carries:
        place = placement.values.get(carry.update)
        placement.values[carry.inner] = placement.values[carry.final] = place
    return placement


def _follow(step: FlatStep, submesh_of, arrivals, recompute: bool) -> tuple[Placement, list[Node]]:
    """Places what is labelled, or follows its operands; returns what must be placed otherwise."""
    placement = Placement()
    varying = {entry.inner for entry in step.slices} | step.varying
    carried = {carry.inner for carry in step.carries}
    leaving = {carry.update for carry in step.carries} | {entry.inner for entry in step.stacked}
    undecided = []
    for node in step.loop:
        if node.scope.backward or any(var in placement.backward for var in node.inputs):
            placement.backward.update(node.outputs)
        changing = [var for var in node.inputs if var in varying or var in carried]
        if changing:
            varying.update(node.outputs)
        if any(var in carried for var in node.inputs):
            carried.update(node.outputs)
        placed = [var for var in changing if placement.values.get(var) is not None]
        submesh = _loop_submesh(node, placed, placement, submesh_of)
        placement.put(node, submesh, _stage_of(node, submesh, placed, placement, arrivals))
        if submesh is None and (
            (changing and not recompute)
            or node.eqn.primitive.name in EXPENSIVE
            or any(var in carried for var in node.inputs)
            or any(var in leaving for var in node.outputs)
        ):
            undecided.append(node)
    return placement, undecided


def _arrivals(step: FlatStep, placement: Placement) -> dict[int, int]:
    """The level at which a value of another submesh first reaches each submesh, going forward."""
    arrivals: dict[int, int] = {}
    for node in step.loop:
        here = placement.nodes[node]
        if here is None or any(var in placement.backward for var in node.outputs):
            continue
        from_others = (placement.values.get(var, here) not in (here, None) for var in node.inputs)
        if node.outputs and any(from_others):
            stage = placement.stage[node.outputs[0]]
            arrivals[here] = min(stage, arrivals.get(here, stage))
    return arrivals


def _loop_submesh(node, placed, placement, submesh_of) -> int | None:
    if node.label is not None:
        return submesh_of(node.label)
    if not placed:
        return None
    backward = any(var in placement.backward for var in node.outputs)
    choose = min if backward else max
    latest = choose(placed, key=lambda var: (placement.stage[var], placement.values[var]))
    return placement.values[latest]


def _stage_of(node, submesh, placed, placement, arrivals) -> int:
    """The forward level of a node: for the backward pass, that of what it differentiates."""
    if node.outputs and node.outputs[0] in placement.backward:
        here = [placement.stage[v] for v in placed if placement.values[v] == submesh]
        if here:
            return max(here)
        return max(
            (
                placement.stage[var]
                for var, place in placement.values.items()
                if place == submesh and var not in placement.backward
            ),
            default=0,
        )
    return max(
        (placement.stage[var] + (placement.values[var] != submesh) for var in placed),
        default=arrivals.get(submesh, 0),
    )


def _place_by_readers(step, undecided: list[Node], placement: Placement, default: int) -> None:
    """Places equations that are too dear to float, or accumulate, with their first reader."""
    readers = reading_stages(step.loop, placement)
    forward = [
        (placement.stage[var], place)
        for node in step.loop
        for var in node.outputs
        if (place := placement.nodes[node]) is not None and var not in placement.backward
    ]
    last = max(forward, default=(0, default))
    for node in reversed(undecided):
        stages = [each for var in node.outputs for each in readers[var]]
        stage, submesh = min(stages, default=last)
        placement.put(node, submesh, stage)
        for var in node.inputs:
            readers[var].add((stage, submesh))


def reading_stages(
    nodes: Iterable[Node], placement: Placement
) -> defaultdict[core.Var, set[tuple[int, int]]]:
    """For each value, the (stage, submesh) of the placed equations that read it.

    A floating equation passes on the readers of its result.
    """
    readers: defaultdict[core.Var, set[tuple[int, int]]] = defaultdict(set)
    for node in reversed(list(nodes)):
        submesh = placement.nodes.get(node)
        if submesh is None:
            found = set().union(*(readers[var] for var in node.outputs))
        else:
            found = {(placement.stage[node.outputs[0]], submesh)} if node.outputs else set()
        for var in node.inputs:
            readers[var] |= found
    return readers


def place_outside(
    step: FlatStep,
    placement: Placement,
    submesh_of: Callable[[Label], int],
    homes: dict[core.Var, int | None],
    replaced: dict[core.Var, core.Var],
    default: int,
    may_gather: bool = False,
) -> dict[core.Var, int | None]:
    """Places the equations before and after the loop, and the arguments.

    Args:
      step: The flat step, hoisted, its accumulators split.
      placement: The places in the loop; the others are added.
      submesh_of: The submesh index of a label.
      homes: Places of arguments that are known (None: replicated).
      replaced: For each state argument, the value that replaces it.
      default: The submesh of large state that nothing reads.
      may_gather: Whether a large value may be gathered from several submeshes.

    Returns:
      The place of every argument: a submesh, or None for replicated over all of them.

    Raises:
      PlacementError: A large value would be gathered from several submeshes.
    """
    homes = dict(homes)
    readers = reading_stages([*step.before, *step.loop], placement)
    for argument in step.arguments:
        if argument not in homes and readers[argument]:
            homes[argument] = min(readers[argument])[1]
    literal = _from_literals(step)
    # A state value lives where its replacement is computed, which may depend on other state.
    while True:
        placement.values.update({arg: homes.get(arg) for arg in step.arguments})
        for node in (*step.before, *step.after):
            if node in literal:
                placement.put(node, None)
            elif placement.nodes.get(node) is None:
                placement.put(node, _outside_submesh(node, placement, submesh_of))
        found = {
            argument: place
            for argument, new in replaced.items()
            if argument not in homes and (place := placement.values.get(new)) is not None
        }
        found = found or _read_outside(step, placement, homes)
        found = found or {
            argument: default
            for argument in replaced
            if argument not in homes and nbytes(argument) > SMALL
        }
        if not found:
            break
        homes.update(found)
    _refuse_gathers(step, placement, may_gather)
    return {argument: homes.get(argument) for argument in step.arguments}


def _read_outside(step: FlatStep, placement: Placement, homes) -> dict[core.Var, int]:
    """Large arguments that only equations outside the loop read live with the first of those."""
    readers = reading_stages([*step.before, *step.after], placement)
    return {
        argument: min(readers[argument])[1]
        for argument in step.arguments
        if argument not in homes and nbytes(argument) > SMALL and readers[argument]
    }


def _from_literals(step: FlatStep) -> set[Node]:
    """The equations that depend on nothing: they float even where their scope has a task."""
    found: set[Node] = set()
    values: set[core.Var] = set(step.constants)
    for node in (*step.before, *step.after):
        if all(var in values for var in node.inputs):
            found.add(node)
            values.update(node.outputs)
    return found


def _outside_submesh(node: Node, placement: Placement, submesh_of) -> int | None:
    if node.label is not None:
        return submesh_of(node.label)
    read: defaultdict[int, list[int]] = defaultdict(list)
    mixed = [nbytes(var) for var in node.inputs if var in placement.mixed]
    for var in node.inputs:
        if (place := placement.values.get(var)) is not None:
            read[place].append(nbytes(var))
    small = all(nbytes(var) <= SMALL for var in (*node.inputs, *node.outputs))
    contestants = sorted(max(sizes) for sizes in (*read.values(), mixed) if sizes)
    # Scalars of several submeshes: whoever needs the result computes it. A gradient that is scaled
    # by one of them stays where it is.
    if small and len(contestants) > 1 and contestants[-1] == contestants[-2]:
        placement.mixed.update(node.outputs)
        return None
    if small and mixed and not read:
        placement.mixed.update(node.outputs)
        return None
    # The first submesh where they are equal: the same on every rank.
    return max(read, key=lambda place: (sum(read[place]), -place), default=None)


def _refuse_gathers(step: FlatStep, placement: Placement, may_gather: bool) -> None:
    """Scalars may join large values of another submesh; vectors and matrices may not.

    Gradients are another matter: the sum of those of several submeshes has to be somewhere.
    """
    for node in (*step.before, *step.after):
        home = placement.nodes[node]
        is_joined = node in placement.joins or node.scope.backward
        if home is None or is_joined or node.label is not None or may_gather:
            continue
        moved = [
            var
            for var in node.inputs
            if placement.values.get(var, home) not in (home, None) and nbytes(var) > SCALAR
        ]
        if moved:
            shapes = ", ".join(var.aval.str_short() for var in moved[:4])
            raise PlacementError(
                f"The optimizer's `{node.eqn.primitive.name}` would gather {shapes} from other "
                "submeshes at every step. Use a transformation that works leaf by leaf (not "
                "optax.flatten)."
            )
