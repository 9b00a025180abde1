"""What Orbax calls for the arrays of a state: each rank writes and reads shards of its own.

Orbax's own handler expects every process to hold a part of every array. Under a pipeline a leaf
lies on one stage: complete on one rank, which Orbax refuses ("host local"), and without a shard on
the others. The files are the same as Orbax's, so that Orbax alone reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from multimesh.state import without_shards
from multimesh.transport import Layout
from multimesh.transport.keys import data_layout, is_key, key_wrapper

__all__ = ["ShardHandler"]


class ShardHandler(ocp.type_handlers.ArrayHandler):
    """Writes the shards of each array that this rank is the first to hold; reads those it needs.

    Each rank writes to a key-value store of its own; Orbax merges them when all are written. The
    writing runs in a thread of Orbax's: it waits for no other rank and does not call MPI.
    """

    def __init__(self):
        super().__init__(enable_write_sharding_file=False, use_replica_parallel=False)

    async def serialize(self, values: Sequence[jax.Array], infos, args=None) -> Sequence[Any]:
        """Copies this rank's shards, since a step may overwrite them, and starts to write them.

        Args:
          values: The arrays. On ranks outside of their submesh they have no shard.
          infos: Where each is to be written.
          args: How each is to be written.

        Returns:
          A future that is done when the shards are written.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        owned = [_Owned.of(value) for value in values]
        return [CommitFutureAwaitingContractedSignals(_write(owned, infos, args), name="shards")]

    async def deserialize(self, infos, args=None) -> Sequence[jax.Array]:
        """Reads the shards on this rank's devices.

        Args:
          infos: Where each array is written.
          args: `ArrayRestoreArgs` with the sharding, shape and dtype of each.

        Returns:
          The arrays. On ranks outside of their submesh they have no shard.
        """
        layouts = [Layout(arg.global_shape, arg.dtype, arg.sharding) for arg in args]
        here = [i for i, layout in enumerate(layouts) if layout.sharding.addressable_devices]
        stored = [_restore_args(data_layout(layouts[i])) for i in here]
        read = await super().deserialize([infos[i] for i in here], stored) if here else []
        present = dict(zip(here, read, strict=True))
        return [_array(layout, present.get(i)) for i, layout in enumerate(layouts)]


@dataclass(frozen=True)
class _Owned:
    """What one rank writes of an array.

    Attributes:
      shape: The shape of the whole array.
      dtype: The dtype of its numbers.
      shard_shape: The shape of every shard.
      pieces: Where each shard that this rank is the first to hold lies, and its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard_shape: tuple[int, ...]
    pieces: list[tuple[tuple[slice, ...], np.ndarray]]

    @classmethod
    def of(cls, array: jax.Array) -> "_Owned":
        layout = Layout(array.shape, array.dtype, array.sharding)
        stored = data_layout(layout)
        data = jax.random.key_data if is_key(layout) else lambda shard: shard
        pieces = [
            (shard.index, np.array(data(shard.data)))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        return cls(stored.shape, stored.dtype, array.sharding.shard_shape(stored.shape), pieces)


async def _write(owned: Sequence[_Owned], infos, args) -> None:
    """Writes the pieces of this rank, all or none."""
    transaction = tensorstore.Transaction(atomic=True)
    for array, info, arg in zip(owned, infos, args, strict=True):
        if not array.pieces:
            continue
        await info.await_path_creation()
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=array.shape,
            local_shape=array.shard_shape,
            dtype=array.dtype,
            process_index=jax.process_index(),
            arg=arg,
        )
        store = await tensorstore.open(
            tensorstore.Spec(spec),
            create=True,
            open=True,
            context=info.ts_context,
            transaction=transaction,
        )
        for index, numbers in array.pieces:
            await store[index].write(numbers, can_reference_source_data_indefinitely=True)
    await transaction.commit_async()


def _restore_args(layout: Layout) -> ocp.ArrayRestoreArgs:
    return ocp.ArrayRestoreArgs(
        sharding=layout.sharding, global_shape=layout.shape, dtype=layout.dtype
    )


def _array(layout: Layout, data: jax.Array | None) -> jax.Array:
    """Makes an array of what was read of it."""
    if data is None:
        return without_shards(layout.shape, layout.dtype, layout.sharding)
    if not is_key(layout):
        return data
    # Shard by shard: a program over the whole array could span ranks.
    wrap = key_wrapper(layout)
    keys = [wrap(shard.data) for shard in data.addressable_shards]
    return jax.make_array_from_single_device_arrays(layout.shape, layout.sharding, keys)
