"""Loads and places batches before the step needs them, as many on every rank."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from multimesh.errors import UsageError
from multimesh.transport import connect

__all__ = ["prefetch"]


def prefetch(
    batches: Iterable[Any], prepare: Callable[[Any], Any], ahead: int = 2
) -> Iterator[Any]:
    """Yields batches that already lie on the devices that read them.

    Collective: every rank iterates. `ahead` batches at a time are placed together; meanwhile a
    thread gets the next ones from `batches`, so that loading them and training overlap. Whether
    all ranks have as many is found out for those together, without a wait in every step.

    Args:
      batches: Host batches. It is read by another thread, up to `ahead` batches before they are
        needed, and may be endless.
      prepare: Places one: `prepare_batch`, or the `prepare` of a `step_fn` or `eval_fn`.
      ahead: How many batches are loaded ahead.

    Yields:
      What `step_fn` takes, until the first rank has no more: all ranks end after as many batches,
      and warn where some of this rank are left.

    Raises:
      UsageError: `ahead` is not a positive integer, or another argument of the wrong kind.
      Exception: Whatever `batches` or `prepare` raises.
    """
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise UsageError(f"ahead must be a positive integer. Got {ahead!r}.")
    if not isinstance(batches, Iterable):
        raise UsageError(f"batches must be an iterable of host batches. Got {batches!r}.")
    if not callable(prepare):
        raise UsageError(
            "prepare must be a function, such as prepare_batch or step_fn.prepare. "
            f"Got {prepare!r}."
        )
    return _placed(iter(batches), prepare, ahead)


def _placed(batches: Iterator[Any], prepare: Callable[[Any], Any], ahead: int) -> Iterator[Any]:
    group, _ = connect()
    given = 0
    with ThreadPoolExecutor(1, thread_name_prefix="multimesh prefetch") as loader:

        def load():
            return loader.submit(lambda: list(itertools.islice(batches, ahead)))

        loading = load()
        while True:
            mine = loading.result()
            counts = group.allgather(len(mine), "prefetch")
            common = min(counts)
            # MPI is for the main thread, and so is `prepare`.
            ready = [prepare(batch) for batch in mine[:common]]
            if common == ahead:
                loading = load()
            yield from ready
            given += common
            if common < ahead:
                _warn_of_rest(counts, group.rank, given)
                return


def _warn_of_rest(counts: list[int], rank: int, given: int) -> None:
    if counts[rank] > min(counts):
        first = counts.index(min(counts))
        warnings.warn(
            f"The batches of rank {first} ended after {given}; rank {rank} has more, which are "
            "left out. Give every rank as many batches.",
            stacklevel=3,
        )
