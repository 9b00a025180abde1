"""`replicate_inputs=True`: every device gets the whole batch, and the numbers stay the same."""

import jax
import numpy as np
import pytest
from support import cases, oracle, ranks

from multimesh.errors import UsageError
from multimesh.jax.flax import parallelize_step

pytestmark = pytest.mark.mpi(ranks=(1, 2))

CASE = cases.CASES["mlp"]
# By number of devices. With all 8 on 2 ranks, the batch would be two shares.
LAYOUTS = {
    1: cases.on_one(2, [0]),
    2: cases.apart(2),
    4: cases.Layout(((0, 1), (4, 5)), (2, 1)),
    8: cases.Layout(((0, 1, 4, 5), (2, 3, 6, 7)), (4, 1)),
}


@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.parametrize("kind", ["global_batch", "local_batch"])
def test_replicated_inputs(kind, devices):
    batches = CASE.batches(16, 2)
    cases.register(CASE, LAYOUTS[devices])
    step_fn, state, _, *rest = parallelize_step(
        CASE.model,
        CASE.optimizer,
        loss_fn=CASE.loss_fn,
        num_microbatches=2,
        reduction=CASE.reduction,
        replicate_inputs=True,
        **{kind: batches[0]},
    )
    if rest:
        assert rest[0].num_shares == 1
    placed = step_fn.prepare(batches[0])
    for array in placed.arrays.values():
        assert all(shard.data.shape == array.shape for shard in array.addressable_shards)
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, ranks.computed_once(oracle.train, CASE, batches))


@pytest.mark.mpi(ranks=1)
def test_it_is_a_flag():
    with pytest.raises(UsageError, match=r"replicate_inputs must be True or False\. Got 1"):
        parallelize_step(
            CASE.model, CASE.optimizer, global_batch=np.ones((4, 8)), replicate_inputs=1
        )
    assert jax.device_count() == 8
