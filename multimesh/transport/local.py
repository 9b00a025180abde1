"""The transport of a single process that owns every device: JAX moves the values itself."""

from collections.abc import Sequence

import jax

from multimesh.errors import StallError
from multimesh.transport.base import Transfer

__all__ = ["LocalChannel", "LocalTransport"]


class LocalTransport:
    """Moves values between the devices of this process. See `base.Transport`."""

    def open(self, transfer: Transfer, depth: int) -> "LocalChannel":
        """Prepares a transfer; no buffers are needed, so `depth` has no effect."""
        del depth
        return LocalChannel(transfer)

    def flush(self) -> None:
        """Does nothing: nothing is ever on its way."""

    def close(self) -> None:
        """Does nothing: there is nothing to give up."""


class LocalChannel:
    """Copies each bundle to its target devices when it is sent. See `base.Channel`."""

    def __init__(self, transfer: Transfer):
        self._name = transfer.name
        self._shardings = [layout.sharding for layout in transfer.targets]
        self._sent: dict[int, list[jax.Array]] = {}

    def post(self, microbatch: int) -> None:
        """Does nothing: no message comes."""

    def send(self, microbatch: int, arrays: Sequence[jax.Array]) -> None:
        """Starts the copies, without waiting for `arrays`; what lies right already stays."""
        moved = list(arrays)
        away = [i for i, to in enumerate(self._shardings) if moved[i].sharding != to]
        copies = jax.device_put([moved[i] for i in away], [self._shardings[i] for i in away])
        for i, copy in zip(away, copies, strict=True):
            moved[i] = copy
        self._sent[microbatch] = moved

    def take(self, microbatch: int) -> list[jax.Array]:
        """Hands the copies over.

        Raises:
          StallError: The microbatch was not sent; in one process nobody else could send it.
        """
        try:
            return self._sent.pop(microbatch)
        except KeyError:
            raise StallError(
                f"{self._name}: microbatch {microbatch} was taken before it was sent. Sent and not "
                f"taken: {sorted(self._sent)}; the instructions of this process are out of order."
            ) from None
