"""What Orbax calls for the arrays of a state: each rank writes and reads shards of its own.

Orbax's own handler expects every process to hold a part of every array. Under a pipeline a leaf
lies on one stage: complete on one rank, which Orbax refuses ("host local"), and without a shard on
the others. The files are the same as Orbax's, so that Orbax alone reads them.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from multimesh.checkpoint.shards import OwnShards, read, write
from multimesh.state import without_shards
from multimesh.transport import Layout
from multimesh.transport.keys import data_layout, is_key, key_wrapper

__all__ = ["ShardHandler"]


class ShardHandler(ocp.type_handlers.ArrayHandler):
    """Writes the shards of each array that this rank is the first to hold; reads those it needs.

    Args:
      begin: Called with the folder and the names of the arrays before anything is written.
        What it returns is called when this rank's shards are written, and waits for the others.
    """

    def __init__(self, begin: Callable[[Path, list[str]], Callable[[], None]]):
        super().__init__(enable_write_sharding_file=False, use_replica_parallel=False)
        self._begin = begin

    async def serialize(self, values: Sequence[jax.Array], infos, args=None) -> Sequence[Any]:
        """Copies this rank's shards, and starts to write them.

        Args:
          values: The arrays.
          infos: Where each is to be written: the name, and the folder of all.
          args: Not used.

        Returns:
          A future that is done when the shards of all ranks are written.
        """
        del args
        names = [info.name for info in infos]
        own = {name: OwnShards.of(value) for name, value in zip(names, values, strict=True)}
        folder = Path(infos[0].parent_dir)
        others = self._begin(folder, names)

        async def write_all():
            await write(own, folder)
            others()

        return [CommitFutureAwaitingContractedSignals(write_all(), name="shards")]

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
        arrays = read([infos[i] for i in here], [data_layout(layouts[i]) for i in here])
        present = dict(zip(here, arrays, strict=True))
        return [_array(layout, present.get(i)) for i, layout in enumerate(layouts)]

    async def metadata(self, infos) -> Sequence[Any]:
        """Reads the shape and dtype of each array; waits for all, though one may be damaged."""
        read = super().metadata
        results = await asyncio.gather(*(read([info]) for info in infos), return_exceptions=True)
        all_metadata = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            all_metadata += result
        return all_metadata


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
