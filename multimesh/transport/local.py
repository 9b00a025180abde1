"""The transport of a single process that owns every device: JAX moves the values itself."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from multimesh.errors import StallError
from multimesh.transport.base import Layout, Transfer
from multimesh.transport.upload import COPY_UP_TO, uploads

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
    """Copies each bundle to its target devices. See `base.Channel`.

    `jax.device_put` from one device to another takes 100 to 200 us of Python per array. On a CPU,
    where the numbers can be read in place, a small array on one device goes through host memory
    when it is taken: a tenth of that, but it waits for the sender's computation.
    """

    def __init__(self, transfer: Transfer):
        self._name = transfer.name
        self._shardings = [layout.sharding for layout in transfer.targets]
        self._sent: dict[int, list[jax.Array]] = {}
        pairs = list(zip(transfer.sources, transfer.targets, strict=True))
        self._by_host = [i for i, pair in enumerate(pairs) if _small_on_cpu(*pair)]
        self._by_device = [i for i in range(len(pairs)) if i not in self._by_host]
        self._uploads = uploads(
            [jax.ShapeDtypeStruct(pairs[i][0].shape, pairs[i][0].dtype) for i in self._by_host],
            [self._shardings[i] for i in self._by_host],
        )

    def post(self, microbatch: int) -> None:
        """Does nothing: no message comes."""

    def send(self, microbatch: int, arrays: Sequence[jax.Array]) -> None:
        """Starts the copies, without waiting for `arrays`; what lies right already stays."""
        moved = list(arrays)
        away = [i for i in self._by_device if moved[i].sharding != self._shardings[i]]
        if away:
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
            moved = self._sent.pop(microbatch)
        except KeyError:
            raise StallError(
                f"{self._name}: microbatch {microbatch} was taken before it was sent. Sent and not "
                f"taken: {sorted(self._sent)}; the instructions of this process are out of order."
            ) from None
        for upload in self._uploads:
            places = [self._by_host[index] for index in upload.indices]
            copies = upload.call([np.asarray(moved[place]) for place in places])
            for place, copy in zip(places, copies, strict=True):
                moved[place] = copy
        return moved


def _small_on_cpu(source: Layout, target: Layout) -> bool:
    devices = source.sharding.device_set | target.sharding.device_set
    if (
        jax.dtypes.issubdtype(source.dtype, jax.dtypes.extended)
        or source.sharding == target.sharding
    ):
        return False
    alone = len(source.sharding.device_set) == len(target.sharding.device_set) == 1
    size = math.prod(source.shape) * source.dtype.itemsize
    return alone and size <= COPY_UP_TO and all(device.platform == "cpu" for device in devices)
