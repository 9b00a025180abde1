"""Data, tensor and pipeline parallelism at once: 2 x 2 x 2 devices, on any number of ranks.

Two replicas of a pipeline of two stages, each stage split over two devices. Under two ranks each
holds a whole replica, under eight every device is a rank of its own.
"""

import jax
import numpy as np
import pytest
from support import cases, oracle, ranks

from multimesh.jax import fetch

pytestmark = pytest.mark.mpi(ranks=(1, 2, 4, 8))

# Replica 0 has the devices 0 to 3, replica 1 the devices 4 to 7. "x" goes over the replicas.
REPLICAS = cases.Layout(((0, 1, 4, 5), (2, 3, 6, 7)), (2, 2))


def test_two_replicas_of_a_pipeline_of_split_stages():
    case = cases.CASES["masked"]  # tied embeddings, clipping, a loss weighted by tokens
    batches = case.batches(8, 2)
    step_fn, state, _ = cases.build(case, REPLICAS, 8, 2)
    kernel = state.params["params"]["block_0"]["attention"]["query"]["kernel"].value
    assert {shard.data.shape for shard in kernel.addressable_shards} <= {(8, 8)}
    got = oracle.train_pipeline(step_fn, state, batches)
    oracle.assert_same_training(got, ranks.computed_once(oracle.train, case, batches))


def test_replicas_stay_equal_to_the_bit():
    case = cases.mlp([1, 1])
    step_fn, state, _ = cases.build(case, cases.Layout(REPLICAS.devices, (4, 1)), 16, 4)
    for batch in case.batches(16, 3):
        _, state = step_fn(state, batch)
    whole = fetch(state.params)
    for array, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole), strict=True):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
