"""Host batches: their structure, who gives which rows, and where those go.

A batch is given whole on every rank (`global_batch`), or each process gives its share
(`local_batch`). Microbatch k is made of the k-th slice of every share. Nothing of a batch moves
between ranks during a step: each leaf is placed on every submesh that reads it.

    spec      the tree, shapes and dtypes of a batch
    shares    how its rows are divided over processes
    placer    copies the rows of each microbatch to the devices that read them
"""

from multimesh.batch.placer import COMPARED, PlacedBatch, Placer
from multimesh.batch.shares import Shares, find_shares
from multimesh.batch.spec import BatchSpec

__all__ = ["COMPARED", "BatchSpec", "PlacedBatch", "Placer", "Shares", "find_shares"]
