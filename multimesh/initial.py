"""The first state of a step: each leaf is made where it lives, and nowhere else."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

from multimesh.stages.initialize import Initializer
from multimesh.state import assemble
from multimesh.step import Step

__all__ = ["make_leaves"]


def make_leaves(
    step: Step, closed: core.ClosedJaxpr, values: Sequence[np.ndarray], leaves: int | None = None
) -> list[jax.Array]:
    """Runs a traced initialization, on each rank only what it keeps of it.

    Args:
      step: The step whose state it is.
      closed: The traced function: from `values` to leaves of the state.
      values: What it reads, on the host.
      leaves: How many leaves of the state it makes, from the first on; None: all of them.

    Returns:
      The leaves, as the step takes them.
    """
    state = step.state
    homes = state.homes[:leaves]
    initializer = Initializer(closed, values, state.submeshes, homes, state.local_sharding)
    made = {place: initializer.run(initializer.compile(place)) for place in state.mine}
    found = []
    for index, home in enumerate(homes):
        if home is None and made:
            parts = {place: leaves_of[index] for place, leaves_of in made.items()}
            found.append(assemble(parts, state.everywhere))
        elif home in made:
            found.append(made[home][index])
        else:
            found.append(state.absent(index))
    return found
