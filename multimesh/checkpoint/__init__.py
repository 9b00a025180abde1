"""The state on disk: an Orbax checkpoint in which each leaf is written once.

A rank writes the shards that it is the first to hold.

names     the leaves of a state and of a checkpoint by name, and how they differ
handler   how one rank writes and reads its shards
manager   Orbax's checkpoint manager, with that handler
"""

from multimesh.checkpoint.manager import Manager
from multimesh.checkpoint.names import Leaves, differences, leaves_of

__all__ = ["Leaves", "Manager", "differences", "leaves_of"]
