"""Between global arrays and the shards of them on this rank: taking apart and putting together."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from multimesh.errors import UsageError
from multimesh.transport.base import Layout
from multimesh.transport.exchange import Exchange
from multimesh.transport.upload import uploads

__all__ = ["Assembly", "Copy", "ShardFinder"]


class ShardFinder:
    """Finds the shard on a given device in arrays of one layout.

    Arrays that are made by the same compiled function share one sharding object, so the order of
    their shards is worked out once.

    Args:
      name: Of the transfer, for errors.
      layout: What the arrays must be.
    """

    def __init__(self, name: str, layout: Layout):
        self._name = name
        self._layout = layout
        self._seen: Sharding | None = None
        self._positions: dict[jax.Device, int] = {}

    def find(self, array: jax.Array, device: jax.Device) -> jax.Array:
        """Returns the shard of `array` on `device`, as an array on that device alone.

        Raises:
          UsageError: `array` is not what the layout promised.
        """
        if array.sharding is not self._seen:
            self._learn(array)
        return array.addressable_data(self._positions[device])

    def _learn(self, array: jax.Array) -> None:
        expected = self._layout
        if (array.shape, array.dtype) != (expected.shape, expected.dtype) or not (
            array.sharding.is_equivalent_to(expected.sharding, len(expected.shape))
        ):
            raise UsageError(
                f"{self._name}: sent arrays must be as planned. Got {array.dtype}{array.shape} "
                f"with {array.sharding}, expected {expected.dtype}{expected.shape} with "
                f"{expected.sharding}; compile the sender with this output sharding."
            )
        self._positions = {
            shard.device: position for position, shard in enumerate(array.addressable_shards)
        }
        self._seen = array.sharding


@dataclass(frozen=True)
class Copy:
    """A shard that goes from a device of this rank to another one.

    Attributes:
      value: Which value of the bundle.
      source: The device that has it.
      destination: Where `jax.device_put` is to put it.
    """

    value: int
    source: jax.Device
    destination: Sharding


class Assembly:
    """Makes global arrays of a rank's arrivals and copies.

    Args:
      exchange: The rank's part of the transfer.
      targets: The layouts of the arrays to make.
    """

    def __init__(self, exchange: Exchange, targets: Sequence[Layout]):
        self._targets = targets
        self._single = [len(layout.sharding.device_set) == 1 for layout in targets]
        arrivals = [
            (number, arrival, device)
            for number, arrival in enumerate(exchange.arrivals)
            for device in arrival.block.devices
        ]
        self._arrivals = [number for number, _, _ in arrivals]
        self._uploads = uploads(
            [jax.ShapeDtypeStruct(arrival.shape, arrival.dtype) for _, arrival, _ in arrivals],
            [self._destination(arrival.value, device) for _, arrival, device in arrivals],
        )
        copies = [
            (value, piece.source, device)
            for value, piece in exchange.copies
            for device in piece.target.devices
        ]
        self.copies = [Copy(v, source, self._destination(v, to)) for v, source, to in copies]
        order = [i for upload in self._uploads for i in upload.indices]
        uploaded = [(arrivals[i][1].value, arrivals[i][2]) for i in order]
        self._slots = self._order(uploaded + [(value, device) for value, _, device in copies])

    def arrays(self, arrived: Sequence[np.ndarray], copied: Sequence[jax.Array]) -> list[jax.Array]:
        """Assembles the bundle.

        Args:
          arrived: One host array for each arrival of the exchange. JAX may read them in place, so
            they must not change until their last view is gone.
          copied: What became of `copies`.

        Returns:
          One global array for each target.
        """
        shards: list[jax.Array] = []
        for upload in self._uploads:
            shards += upload.call([arrived[self._arrivals[i]] for i in upload.indices])
        shards += copied
        return [
            shards[slots[0]]
            if single and slots
            else jax.make_array_from_single_device_arrays(
                layout.shape, layout.sharding, [shards[slot] for slot in slots], dtype=layout.dtype
            )
            for layout, single, slots in zip(self._targets, self._single, self._slots, strict=True)
        ]

    def _order(self, shards: Sequence[tuple[int, jax.Device]]) -> list[list[int]]:
        """For each target, the positions of its shards in a list of (value, device)."""
        slots = {shard: slot for slot, shard in enumerate(shards)}
        return [
            [
                slots[value, device]
                for device in layout.sharding.devices_indices_map(layout.shape)
                if (value, device) in slots
            ]
            for value, layout in enumerate(self._targets)
        ]

    def _destination(self, value: int, device: jax.Device) -> Sharding:
        """A value on a single device gets its sharding at once, and needs no assembly."""
        sharding = self._targets[value].sharding
        return sharding if self._single[value] else SingleDeviceSharding(device)
