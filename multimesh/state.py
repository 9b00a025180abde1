"""The state between steps: global arrays, each on its stage's submesh or replicated over all.

A rank outside a leaf's submesh holds the same array without a shard: shape, dtype and sharding are
there, the numbers are not.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh.errors import UsageError
from multimesh.plan import Instance, Plan
from multimesh.trees import difference

__all__ = ["State", "assemble", "lies_as", "without_shards"]


def without_shards(shape, dtype, sharding: NamedSharding) -> jax.Array:
    """Returns the array of a rank that has no device of a submesh."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def lies_as(array: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array has a sharding, perhaps spelled otherwise: JAX pads that of random keys."""
    theirs = array.sharding
    if theirs == sharding:
        return True
    is_named = isinstance(theirs, NamedSharding) and theirs.mesh == sharding.mesh
    return is_named and theirs.is_equivalent_to(sharding, array.ndim)


def assemble(parts: Mapping[int, jax.Array], sharding: NamedSharding) -> jax.Array:
    """Makes a replicated array from its copies on submeshes.

    Args:
      parts: The same value on each submesh of this rank.
      sharding: Replicated over all devices of the step.

    Returns:
      The global array. Nothing is copied.
    """
    buffers = {
        shard.device: shard.data for part in parts.values() for shard in part.addressable_shards
    }
    example = next(iter(parts.values()))
    local = [buffers[device] for device in sharding.mesh.devices.flat if device in buffers]
    return jax.make_array_from_single_device_arrays(
        example.shape, sharding, local, dtype=example.dtype
    )


class State:
    """Takes a state apart into a step's slots, and knows what its leaves must look like."""

    def __init__(
        self,
        plan: Plan,
        slots: Mapping[tuple[Instance, int], int],
        tree: Any,
        mesh: Mesh,
        rank: int,
        donated: Collection[int] = (),
    ):
        """Finds the slots of the leaves.

        Args:
          plan: The plan.
          slots: The rank's slots.
          tree: The tree of the state.
          mesh: All devices of the step.
          rank: This process.
          donated: The leaves that the step may overwrite.
        """
        self.tree = tree
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        cut = plan.cut
        self.arguments = cut.step.arguments[: tree.num_leaves]
        self.homes = [cut.homes[argument] for argument in self.arguments]
        self.mine = [place.index for place in cut.submeshes if rank in place.processes]
        self.shardings = [
            self.everywhere if home is None else cut.shardings.of(argument, home)
            for argument, home in zip(self.arguments, self.homes, strict=True)
        ]
        self.submeshes = cut.submeshes
        self.donated = frozenset(donated)
        self.names = [jax.tree_util.keystr(path) for path, _ in _paths(tree)]
        self._placed: list[tuple[int, int]] = []
        self._replicated: list[tuple[int, list[tuple[int, int]]]] = []
        for index, (argument, home) in enumerate(zip(self.arguments, self.homes, strict=True)):
            # Where a leaf has a home, other submeshes are sent copies of it.
            used = [
                (submesh, slots[Instance(argument, 0), submesh])
                for submesh in self.mine
                if home in (None, submesh) and (Instance(argument, 0), submesh) in slots
            ]
            if home is None and used:
                self._replicated.append((index, used))
            elif used:
                self._placed.append((index, used[0][1]))
        # Copies of replicated leaves by submesh, as the last step left them: (leaf, copies).
        self.copies: dict[int, tuple[jax.Array, dict[int, jax.Array]]] = {}

    def local_sharding(self, index: int, submesh: int) -> NamedSharding:
        """How a leaf lies on one of the submeshes that hold it."""
        if self.homes[index] is None:
            return NamedSharding(self.submeshes[submesh].mesh, PartitionSpec())
        return self.shardings[index]

    def absent(self, index: int) -> jax.Array:
        """A leaf as a rank outside of its submesh has it."""
        aval = self.arguments[index].aval
        return without_shards(aval.shape, aval.dtype, self.shardings[index])

    def fill(self, store: list, state: Any) -> list[jax.Array]:
        """Puts a state's arrays into the slots that the instructions read.

        Returns:
          The state's leaves.

        Raises:
          UsageError: The state is not one of this step, or was donated to an earlier one.
        """
        leaves, tree = jax.tree.flatten(state)
        if tree != self.tree:
            raise UsageError(
                "The state must have the leaves of the one that parallelize_step returned. "
                f"{difference(self.tree, state)}"
            )
        self.check(leaves)
        self.check_distinct(leaves)
        for index, slot in self._placed:
            store[slot] = leaves[index]
        for index, used in self._replicated:
            copies = self._copies(index, leaves[index])
            for submesh, slot in used:
                store[slot] = copies[submesh]
        return leaves

    def check(self, leaves: list) -> None:
        """Checks that each leaf lies where the step expects it."""
        for leaf, argument, sharding, name in zip(
            leaves, self.arguments, self.shardings, self.names, strict=True
        ):
            if isinstance(leaf, jax.Array):
                if lies_as(leaf, sharding) and leaf.shape == argument.aval.shape:
                    if leaf.is_deleted():
                        raise UsageError(
                            f"The state leaf {name} was donated to an earlier step. Use the state "
                            "that step returned, or build the step with donate=False."
                        )
                    continue
                got = f"{leaf.dtype}{list(leaf.shape)} on {leaf.sharding}"
            else:
                got = type(leaf).__name__
            raise UsageError(
                f"The state leaf {name} must be {argument.aval.str_short()} on {sharding}. "
                f"Got {got}. Pass the train_state that parallelize_step or step_fn returned."
            )

    def check_distinct(self, leaves: list) -> None:
        """Checks that what is donated is given once: its memory can be taken over only once."""
        places: dict[int, int] = {}
        for index, leaf in enumerate(leaves if self.donated else ()):
            other = places.setdefault(id(leaf), index)
            if other != index and not self.donated.isdisjoint((index, other)):
                raise UsageError(
                    f"The state leaves {self.names[other]} and {self.names[index]} are one array, "
                    "which cannot be donated: the step overwrites it for one of them. Copy it for "
                    "the other (jax.numpy.copy), or do not donate the state."
                )

    def _copies(self, index: int, leaf: jax.Array) -> dict[int, jax.Array]:
        known = self.copies.get(index)
        if known is not None and known[0] is leaf:
            return known[1]
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        copies = {}
        for submesh in self.mine:
            mesh = self.submeshes[submesh].mesh
            local = [by_device[device] for device in mesh.devices.flat if device in by_device]
            copies[submesh] = jax.make_array_from_single_device_arrays(
                leaf.shape, self.local_sharding(index, submesh), local
            )
        return copies


def _paths(tree):
    leaves = jax.tree.unflatten(tree, range(tree.num_leaves))
    return jax.tree_util.tree_flatten_with_path(leaves)[0]
