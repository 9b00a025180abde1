"""Batches that are loaded and placed ahead: the same training, and the same end on every rank."""

import itertools
import threading
import warnings

import jax
import pytest
from support import cases, oracle, ranks

from multimesh.errors import UsageError
from multimesh.jax import prefetch

pytestmark = pytest.mark.mpi(ranks=(1, 2))

RANK, SIZE = jax.process_index(), jax.process_count()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_training_on_prefetched_batches(ahead):
    case = cases.mlp([1, 1])
    batches = case.batches(8, 4)
    step_fn, state, _ = cases.build(case, cases.apart(2), 8, 2)
    got = oracle.train_pipeline(step_fn, state, prefetch(batches, step_fn.prepare, ahead))
    oracle.assert_same_training(got, ranks.computed_once(oracle.train, case, batches))


def test_all_ranks_end_with_the_shortest_iterator():
    numbers = range(5 if RANK == SIZE - 1 else 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(prefetch(numbers, lambda number: number, 3)) == [0, 1, 2, 3, 4]
    expected = [] if RANK == SIZE - 1 else [f"rank {SIZE - 1} ended after 5"]
    assert len(caught) == len(expected)
    assert all(text in str(each.message) for text, each in zip(expected, caught, strict=True))


def test_an_endless_iterator_is_read_no_further_than_ahead():
    read = []
    batches = prefetch(map(read.append, itertools.count()), lambda batch: batch, 2)
    for _ in range(3):
        next(batches)
    batches.close()
    assert len(read) <= 6
    assert not [each for each in threading.enumerate() if "prefetch" in each.name]


def test_errors_of_the_loader_reach_the_caller():
    def load():
        yield 0
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(prefetch(load(), lambda batch: batch, 2))
    with pytest.raises(UsageError, match="ahead must be a positive integer"):
        prefetch([], lambda batch: batch, 0)
    with pytest.raises(UsageError, match="batches must be an iterable"):
        prefetch(None, lambda batch: batch)
    with pytest.raises(UsageError, match="prepare must be a function"):
        prefetch([], None)
