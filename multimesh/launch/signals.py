"""Signals as something to wait for, beside sockets and pipes, in one `select`."""

import os
import signal
from collections.abc import Iterable

__all__ = ["signal_pipe"]


def signal_pipe(numbers: Iterable[signal.Signals]) -> int:
    """Takes over some signals of this process.

    Args:
      numbers: The signals.

    Returns:
      A descriptor that gives one byte, its number, for each signal that arrives.
    """
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end)
    for number in numbers:
        # Python writes the byte, but only for signals that have a handler.
        signal.signal(number, lambda *_: None)
    return read_end
