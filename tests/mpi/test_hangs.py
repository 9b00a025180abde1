"""Every schedule, number of microbatches and message size finishes, with exact numbers.

A run with both ranks sending first, or leaning on MPI's eager buffers, stops here for ever; CI runs
this file with the eager limit at 0 too.
"""

import jax
import numpy as np
import pytest
from support import cases

from multimesh.jax import fetch

# One row for each microbatch, so that an activation is one row of float32.
FEATURES = {"8 B": 2, "32 KB": 2**13, "4 MB": 2**20}
STAGES = max(2, jax.process_count())


def _check(stages, features, microbatches, schedule):
    """One step, whose loss and gradients are sums of squares of the rows' codes."""
    case = cases.echo(stages, features)
    batch = case.make_batch(microbatches, 0)
    layout = cases.apart(stages)
    step_fn, state, _ = cases.build(case, layout, microbatches, microbatches, schedule=schedule)
    loss, state = step_fn(state, batch)
    expected = np.square(batch["labels"]).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for scale in jax.tree.leaves(fetch(state.params)):
        np.testing.assert_array_equal(scale, 1 - np.float32(expected / features))


@pytest.mark.parametrize("size", FEATURES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_finishes(schedule, microbatches, size):
    _check(STAGES, FEATURES[size], microbatches, schedule)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_microbatch_through_more_stages(stages):
    _check(stages, 4, 1, "1f1b")
