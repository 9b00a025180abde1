"""How a value moves from one submesh to another.

    base        what a transfer is, and what every transport offers
    local       the transport of a single process
    reshard     which piece of which shard goes where (pure)
    exchange    the messages of one rank, and where its shards will lie in memory (pure)
    shards      taking global arrays apart and putting them together
    upload      host memory becomes arrays on devices
    keys        PRNG keys travel as integers
    buffers     memory for messages, reused when nobody can read it any more
    mailbox     MPI messages of bytes
    waiting     polling without taking the core that computes
    mpi         the transport between ranks
    group       the control plane: comparing plans, sharing an order, barriers
    connection  connect(): picks the above for this job

All ranks plan with the same code from the same layouts; only messages of bytes pass between them.
"""

from multimesh.transport.base import Channel, Group, Layout, Transfer, Transport
from multimesh.transport.connection import connect

__all__ = ["Channel", "Group", "Layout", "Transfer", "Transport", "connect"]
