"""Memory for messages, reused as soon as nobody can read it any more, and never before.

A receive buffer becomes an array without a copy, and lives as long as that array, or as the last
computation that reads it. Only the runtime knows when that is. So the pool hands out a *lease*: a
NumPy array whose base is an object that every view of it, JAX's included, keeps alive. When the
last view is gone, the object's finalizer gives the memory back.
"""

import math
from collections import defaultdict

import numpy as np

__all__ = ["ALIGNMENT", "BufferPool", "aligned"]

ALIGNMENT = 64  # bytes: what XLA asks of memory that it is to use without a copy
_POISON = 0xFF  # repeated, it is a NaN in every floating-point format


def aligned(nbytes: int) -> int:
    """Rounds a size or an offset in bytes up to the alignment."""
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


class BufferPool:
    """Aligned buffers, kept by size.

    Args:
      poison: Fill every buffer with NaNs before it is handed out, so that a read of something that
        was never received shows. For tests.

    Attributes:
      made: How many buffers there are, free or not.
    """

    def __init__(self, poison: bool = False):
        self.made = 0
        self._poison = poison
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def reserve(self, nbytes: int, count: int) -> None:
        """Makes `count` more buffers of `nbytes`, with their pages in place."""
        for _ in range(count):
            memory = self._allocate(nbytes)
            memory.fill(0)
            self._free[nbytes].append(memory)

    def lease(self, nbytes: int) -> np.ndarray:
        """Returns a buffer of `nbytes` bytes that is free until its last view is gone.

        It never waits: when no buffer is free, another one is made.
        """
        free = self._free[nbytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = self._allocate(nbytes)
        if self._poison:
            memory.fill(_POISON)
        return np.asarray(_Lease(memory, free))

    def _allocate(self, nbytes: int) -> np.ndarray:
        self.made += 1
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]


class _Lease:
    """Stands between the memory and its users; gone when they are."""

    def __init__(self, memory: np.ndarray, free: list[np.ndarray]):
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._free = free

    def __del__(self):
        # The runtime may run this on any thread; append is atomic.
        self._free.append(self._memory)
