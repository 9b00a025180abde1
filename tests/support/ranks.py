"""What tests need to know about the other ranks; with one process it is all trivial.

It talks on COMM_WORLD, as a user's own code would.
"""

import contextlib

import jax

__all__ = ["computed_once", "everywhere", "noted_compilations", "state_bytes", "world"]


def world():
    """The user's communicator, or None in a single process."""
    if jax.process_count() == 1:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def everywhere(value):
    """The list of every rank's value."""
    return [value] if world() is None else world().allgather(value)


def computed_once(function, *arguments):
    """What `function` returns on rank 0, on every rank: spares the others the work."""
    if world() is None:
        return function(*arguments)
    result = function(*arguments) if world().rank == 0 else None
    return world().bcast(result)


def state_bytes(tree):
    """Bytes of a tree's arrays, step counters and other scalars aside: (held here, in all)."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return held, sum(leaf.nbytes for leaf in leaves)


@contextlib.contextmanager
def noted_compilations():
    """Gives a list that grows by the name of each program that XLA compiles in this process."""
    names = []

    def listen(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
