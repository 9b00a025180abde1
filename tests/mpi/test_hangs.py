"""Every schedule, number of microbatches and message size finishes, with exact numbers.

A run with both ranks sending first, or leaning on MPI's eager buffers, stops here for ever; the
tests run without eager messages too.
"""

import numpy as np
import pytest
from support import cases

from multimesh.jax import fetch

# Floats in a row of each stage's output. With one row in a microbatch, activations and cotangents
# of 8 B, 32 KB and 4 MB cross between the stages, all in one pipeline.
WIDTHS = [2, 2**13, 2**20, 2**20]
# With 2 ranks the stages are on ranks 0, 1, 0, 1, so that every size crosses between the two,
# both ways at once; with 4 each has a stage.
ALTERNATING = cases.Layout(((0,), (4,), (2,), (6,)), (1, 1))

# MPI sends small messages before they are asked for. In this job it never does: the smallest limit
# that Open MPI takes is 80 bytes, so the sends are synchronous too.
NEVER_EAGER = {"OMPI_MCA_btl_sm_eager_limit": "80", "TESTS_SYNCHRONOUS_SENDS": "1"}
ONE, TWO, FOUR = (pytest.param(n, marks=pytest.mark.mpi(ranks=n)) for n in (1, 2, 4))
TWO_NEVER_EAGER = pytest.param("2, never eager", marks=pytest.mark.mpi(ranks=2, env=NEVER_EAGER))
pytestmark = pytest.mark.usefixtures("ranks")
several_ranks = pytest.mark.parametrize("ranks", [TWO, FOUR, TWO_NEVER_EAGER])


def _check(widths, layout, microbatches, schedule):
    """One step, whose loss and gradients are sums of squares of the rows' codes."""
    case = cases.echo(widths)
    batch = case.make_batch(microbatches, 0)
    step_fn, state, _ = cases.build(case, layout, microbatches, microbatches, schedule=schedule)
    loss, state = step_fn(state, batch)
    expected = np.square(batch["labels"]).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    params = fetch(state.params)["params"]
    for i, width in enumerate(widths):
        # The update is the gradient, subtracted from one.
        np.testing.assert_array_equal(params[f"layer_{i}"]["scale"], 1 - expected / width)


@several_ranks
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_finishes(schedule, microbatches):
    _check(WIDTHS, ALTERNATING, microbatches, schedule)


@several_ranks
@pytest.mark.parametrize("microbatches", [1, 8])
@pytest.mark.parametrize("size", WIDTHS[:3])
def test_two_ranks_exchange_one_size(size, microbatches):
    """Nothing but messages of one size, on the first and the last rank."""
    _check([size, size], cases.Layout(((0,), (7,)), (1, 1)), microbatches, "1f1b")


@pytest.mark.parametrize("ranks", [ONE, TWO, FOUR, TWO_NEVER_EAGER])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_microbatch_through_more_stages(stages):
    _check([4] * stages, cases.apart(stages), 1, "1f1b")
