"""Brings arrays to where a program reads them, from wherever they are."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from multimesh.errors import UsageError
from multimesh.fingerprint import compare
from multimesh.source import Context
from multimesh.state import lies_as, without_shards
from multimesh.transport import Channel, Layout, Transfer

__all__ = ["Mover", "is_global"]


def is_global(leaf: Any, ranks: int) -> bool:
    """Whether every rank holds a leaf as one and the same array of all of them.

    Such an array has a sharding over named axes. Any other is a rank's own copy of a value that all
    ranks have.
    """
    return ranks > 1 and isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)


class Mover:
    """Moves arrays of a program's arguments; what moves once may move again the same way."""

    def __init__(self, context: Context):
        self.context = context
        self.channels: dict[tuple, Channel] = {}

    def move(
        self, leaves: Sequence[Any], shardings: Sequence[NamedSharding], names: Sequence[str]
    ) -> list[jax.Array]:
        """Gives leaves their shardings. Collective where one is an array of several ranks.

        Args:
          leaves: Arrays of the host, of this process, or of all ranks; or numbers.
          shardings: How each is to lie.
          names: What each is, for errors.

        Returns:
          The arrays; those that lie as they are to, as they came.

        Raises:
          UsageError: A leaf was donated, or is no array.
          RankMismatchError: The ranks do not move the same.
        """
        moved = [self._move(*each) for each in zip(leaves, shardings, names, strict=True)]
        self.context.transport.flush()
        return moved

    def _move(self, leaf: Any, sharding: NamedSharding, name: str) -> jax.Array:
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise UsageError(
                    f"{name} was donated to an earlier call. Use what that call returned, or do "
                    "not donate it."
                )
            if lies_as(leaf, sharding):
                return leaf
            if is_global(leaf, self.context.group.size):
                return self._transfer(leaf, sharding, name)
        else:
            leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
        parts = [
            _copy(leaf[index], device)
            for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, sharding, parts, dtype=leaf.dtype
        )

    def _transfer(self, leaf: jax.Array, sharding: NamedSharding, name: str) -> jax.Array:
        key = leaf.shape, leaf.dtype, leaf.sharding, sharding
        if key not in self.channels:
            compare(
                self.context.group,
                {f"place of {name}": _place_text(leaf)},
                "Arrays of several ranks must be given by all of them.",
            )
            source = Layout(leaf.shape, leaf.dtype, leaf.sharding)
            target = Layout(leaf.shape, leaf.dtype, sharding)
            transfer = Transfer(f"{name} to where it is read", (source,), (target,))
            self.channels[key] = self.context.transport.open(transfer, 1)
        channel = self.channels[key]
        channel.post(0)
        if leaf.sharding.addressable_devices:
            channel.send(0, [leaf])
        if not sharding.addressable_devices:
            return without_shards(leaf.shape, leaf.dtype, sharding)
        (moved,) = channel.take(0)
        return moved


def _copy(part: Any, device: jax.Device) -> jax.Array:
    """Copies to a device: what was moved may be donated, and is not the caller's then."""
    if isinstance(part, jax.Array):
        return jax.device_put(part, device, may_alias=False)
    return jax.device_put(np.array(part), device)


def _place_text(leaf: jax.Array) -> str:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    devices = [device.id for device in sharding.mesh.devices.flat]
    return f"{leaf.dtype}{list(leaf.shape)} on devices {devices} by {sharding.spec}"
