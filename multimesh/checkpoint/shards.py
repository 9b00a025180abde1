"""Writes the shards of a state that one rank is the first to hold, and reads those it needs.

The format is Orbax's, which keeps one key-value store for each process, and merges them when all
are written. Nothing here waits for another rank or calls MPI, so that it can run in a thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from multimesh.transport import Layout
from multimesh.transport.keys import data_layout, is_key

__all__ = ["OwnShards", "read", "write"]


@dataclass(frozen=True)
class OwnShards:
    """What this rank writes of an array.

    Attributes:
      shape: The shape of the whole array.
      dtype: The dtype of its numbers; for random keys, of the integers inside them.
      shard_shape: The shape of every shard.
      pieces: Where each shard that this rank is the first to hold lies, and its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard_shape: tuple[int, ...]
    pieces: list[tuple[tuple[slice, ...], np.ndarray]]

    @classmethod
    def of(cls, array: jax.Array) -> "OwnShards":
        """Copies the shards, so that the next step can have their memory.

        Args:
          array: On ranks outside of its submesh it has no shard.
        """
        layout = Layout(array.shape, array.dtype, array.sharding)
        stored = data_layout(layout)
        data = jax.random.key_data if is_key(layout) else lambda shard: shard
        pieces = [
            (shard.index, np.array(data(shard.data)))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        return cls(stored.shape, stored.dtype, array.sharding.shard_shape(stored.shape), pieces)


async def write(state: Mapping[str, OwnShards], folder: Path) -> None:
    """Writes the pieces of this rank, all or none.

    Args:
      state: What to write of each array, by the name that Orbax gives to it.
      folder: The folder that Orbax made for the arrays.
    """
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    transaction = tensorstore.Transaction(atomic=True)
    for name, array in state.items():
        if not array.pieces:
            continue
        spec = ocp.type_handlers.get_json_tspec_write(
            ocp.type_handlers.ParamInfo(
                name=name,
                parent_dir=folder,
                ts_context=context,
                use_compression=False,  # of little use to floats, and slow
                use_zarr3=False,
            ),
            use_ocdbt=True,
            global_shape=array.shape,
            local_shape=array.shard_shape,
            dtype=array.dtype,
            process_index=jax.process_index(),
        )
        store = await tensorstore.open(
            tensorstore.Spec(spec), create=True, open=True, context=context, transaction=transaction
        )
        for index, numbers in array.pieces:
            await store[index].write(numbers, can_reference_source_data_indefinitely=True)
    await transaction.commit_async()


def read(
    infos: Sequence[ocp.type_handlers.ParamInfo], layouts: Sequence[Layout]
) -> list[jax.Array]:
    """Reads the shards on this rank's devices.

    Args:
      infos: Where Orbax has each array.
      layouts: How each is to lie; random keys as the integers inside them.

    Returns:
      The arrays.

    Raises:
      ValueError: A file is damaged.
    """
    stores = _results([_open(info) for info in infos])
    places = [layout.sharding.addressable_devices_indices_map(layout.shape) for layout in layouts]
    # What several devices hold is read once.
    wanted = {
        (position, str(index)): stores[position][index]
        for position, indices in enumerate(places)
        for index in indices.values()
    }
    numbers = dict(zip(wanted, _results([part.read() for part in wanted.values()]), strict=True))
    arrays = []
    for position, (layout, indices) in enumerate(zip(layouts, places, strict=True)):
        # Copies: a CPU device may use host memory in place, and each must have some of its own.
        parts = [
            jax.device_put(np.array(numbers[position, str(index)]), device)
            for device, index in indices.items()
        ]
        arrays.append(
            jax.make_array_from_single_device_arrays(layout.shape, layout.sharding, parts)
        )
    return arrays


def _open(info) -> tensorstore.Future:
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
    return tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context)


def _results(futures: Sequence[tensorstore.Future]) -> list:
    """Waits for all, though one may fail early: nothing must go on reading afterwards."""
    for error in [future.exception() for future in futures]:
        if error is not None:
            raise error
    return [future.result() for future in futures]
