"""The state on disk: an Orbax checkpoint in which each leaf is written once.

names     the leaves of a state and of a checkpoint by name, and how they differ
shards    what this rank writes of a state: the shards that it is the first to hold
parts     the ranks other than 0 write theirs, and say when they are done
handler   what Orbax calls for the arrays, on rank 0 to write, on every rank to read
manager   Orbax's checkpoint manager, on rank 0
"""

from multimesh.checkpoint.manager import Manager
from multimesh.checkpoint.names import Leaves, differences, leaves_of

__all__ = ["Leaves", "Manager", "differences", "leaves_of"]
