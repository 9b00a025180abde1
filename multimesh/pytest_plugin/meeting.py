"""Where ranks wait for one another between the parts of a test, and learn how the others fared."""

import enum
import time

__all__ = ["Meeting", "Outcome"]

_POLL_SECONDS = 0.001


class Outcome(enum.IntEnum):
    """What a rank brings to a meeting."""

    FINE = 0
    FAILED = 1
    LEAVING = 2  # the rank runs no more tests
    EXPECTED = 3  # it has failed as it should (xfail)


class Meeting:
    """Meetings of all ranks of a job, one after the other."""

    def __init__(self, communicator):
        """Prepares the meetings. Collective.

        Args:
          communicator: The job's; a duplicate of it is used, which no test can disturb.
        """
        self._communicator = communicator.Dup()
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def hold(self, outcome: Outcome, limit: float | None = None) -> list[Outcome] | None:
        """Waits until every rank is here.

        Args:
          outcome: What this rank brings.
          limit: Seconds after which it gives up, or None to wait for ever.

        Returns:
          Every rank's outcome; None if some had not come within the limit. No other meeting can
          follow then.
        """
        mine, everyone = bytearray([outcome]), bytearray(self.size)
        # Polled, so that a rank that waits leaves its core to those that work.
        request = self._communicator.Iallgather(mine, everyone)
        deadline = None if limit is None else time.monotonic() + limit
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return [Outcome(byte) for byte in everyone]

    def exchange(self, value) -> list:
        """Every rank's value, where all are known to be here."""
        return self._communicator.allgather(value)
