"""What every transport offers: values described by layouts, moved in bundles through channels.

A *transfer* is a bundle of values that one task makes and another reads: activations going forward,
cotangents going backward. It is opened once, when the step is built, and its *channel* then moves
one instance of the bundle for each microbatch. `LocalTransport` moves within one process,
`MpiTransport` between ranks; both keep the contract written here, and the same tests run on both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from multimesh.errors import UsageError

__all__ = ["Channel", "Group", "Layout", "Transfer", "Transport"]


@dataclass(frozen=True)
class Layout:
    """One value as it lies on one submesh.

    Attributes:
      shape: The global shape.
      dtype: A NumPy, ml_dtypes or JAX key dtype.
      sharding: How the value is spread over the devices of the submesh.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding


@dataclass(frozen=True)
class Transfer:
    """A bundle of values that go together from one submesh to another.

    Attributes:
      name: For messages, such as "F0 -> F1 (layer_0/add)".
      sources: Each value as the sender has it.
      targets: Each value as the receiver needs it, in the same order.

    Raises:
      UsageError: `sources` and `targets` are not the same values.
    """

    name: str
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]

    def __post_init__(self):
        sent = [(layout.shape, layout.dtype) for layout in self.sources]
        wanted = [(layout.shape, layout.dtype) for layout in self.targets]
        if sent != wanted:
            raise UsageError(
                f"{self.name}: sources and targets must have the same shapes and dtypes. "
                f"Got sources {sent}, targets {wanted}; give each value one layout on each side."
            )


class Channel(Protocol):
    """Moves one transfer, microbatch after microbatch.

    On each rank, the microbatches are sent in the order in which the receivers post them. Order on
    a rank that is both sender and receiver: post, send, take.
    """

    def post(self, microbatch: int) -> None:
        """Starts to receive; does nothing on a rank that no message comes to."""

    def send(self, microbatch: int, arrays: Sequence[jax.Array]) -> None:
        """Sends the bundle. Waits for `arrays` to be computed, never for the receiver.

        Called on every rank that has a device of the source submesh.

        Args:
          microbatch: Which instance of the bundle this is.
          arrays: Global arrays with the shardings of the transfer's sources. They may be dropped
            at once, but must not be donated before the receiver has them.
        """

    def take(self, microbatch: int) -> list[jax.Array]:
        """Waits for the bundle and hands it over.

        Called on every rank that has a device of the target submesh.

        Returns:
          Global arrays with the shardings of the transfer's targets.

        Raises:
          StallError: The bundle did not come within the timeout.
        """


class Transport(Protocol):
    """Opens channels, and ends them."""

    def open(self, transfer: Transfer, depth: int) -> Channel:
        """Prepares a transfer. Every rank opens the same transfers in the same order.

        Args:
          transfer: What to move.
          depth: How many microbatches of it are in flight at once. Their buffers are made now; more
            are made when needed.
        """

    def flush(self) -> None:
        """Waits until everything that was sent has left.

        Raises:
          StallError: A message did not leave within the timeout.
        """

    def close(self) -> None:
        """Flushes, and gives up receives that were posted and never taken."""


class Group(Protocol):
    """The control plane: all ranks talking about the step, not in it. Every call is collective.

    Each says what it is `for_what`, such as "fetch": ranks that are at different points of the
    user's program are told so, rather than given one another's values.

    Raises:
      RankMismatchError: From every call, on every rank: what they do it for differs.
      StallError: From every call: another rank did not come within the timeout, or has ended.
    """

    rank: int
    size: int

    def allgather(self, obj: Any, for_what: str) -> list[Any]:
        """Returns the objects of all ranks, in order of rank."""

    def gather(self, obj: Any, for_what: str, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks, in order of rank, on rank `root`; elsewhere None."""

    def broadcast(self, obj: Any, for_what: str, root: int = 0) -> Any:
        """Returns the object that rank `root` gave."""

    def barrier(self, for_what: str) -> None:
        """Returns when every rank has called it."""
