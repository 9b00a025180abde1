"""The transport between ranks: MPI messages of raw bytes, without copies where that is possible.

On the way out, a whole shard is sent straight from the memory of its array. On the way in, it is
received into an aligned buffer that then *becomes* the array. Everything that can be known before
the first message is worked out when a channel is opened; what is left for each microbatch is to
walk through short lists.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from multimesh.errors import StallError, UsageError
from multimesh.launch.activity import Wait
from multimesh.transport.base import Channel, Transfer
from multimesh.transport.buffers import BufferPool
from multimesh.transport.exchange import Message, exchange
from multimesh.transport.keys import data_layout, is_key, key_wrapper
from multimesh.transport.local import LocalChannel
from multimesh.transport.mailbox import MESSAGE_LIMIT, Mailbox
from multimesh.transport.reshard import Piece, blocks
from multimesh.transport.shards import Assembly, ShardFinder

__all__ = ["MpiTransport"]


class MpiTransport:
    """Moves values between ranks. See `base.Transport`.

    Args:
      communicator: An mpi4py communicator that nothing else sends on. Its ranks are JAX's process
        indices.
      stall_timeout: Seconds to wait for a message.
      poison: Fill receive buffers with NaNs before use. For tests.
      message_limit: Longer messages are split, in bytes.
    """

    def __init__(
        self,
        communicator,
        stall_timeout: float,
        poison: bool = False,
        message_limit: int = MESSAGE_LIMIT,
    ):
        self._mailbox = Mailbox(communicator, message_limit, stall_timeout)
        self._poison = poison
        self._channels: weakref.WeakSet[_MpiChannel] = weakref.WeakSet()
        self._opened = 0

    def open(self, transfer: Transfer, depth: int) -> Channel:
        """Prepares a transfer; the channel's number, equal on all ranks, is its tag.

        Raises:
          UsageError: There are more channels than MPI has tags.
        """
        tag = self._opened
        self._opened += 1
        if len(_processes(transfer)) == 1:
            return LocalChannel(transfer)
        if tag > self._mailbox.max_tag:
            raise UsageError(
                f"{transfer.name}: a step can have at most {self._mailbox.max_tag + 1} transfers "
                "between ranks with this MPI. Use fewer tasks."
            )
        channel = _MpiChannel(transfer, tag, depth, self._mailbox, BufferPool(self._poison))
        self._channels.add(channel)
        return channel

    def flush(self) -> None:
        """Waits until everything that was sent has left."""
        self._mailbox.flush()

    def close(self) -> None:
        """Flushes, and gives up receives that were posted and never taken."""
        self._mailbox.flush()
        for channel in self._channels:
            channel.cancel()


@dataclass
class _Instance:
    """One microbatch's bundle on its way to this rank.

    Attributes:
      requests: The receives of each incoming message.
      messages: The bytes of each incoming message.
      shards: Each arrival, as an array in host memory.
      copies: The shards that were copied from device to device.
      sent: Whether this rank has added its own pieces.
    """

    requests: list[list[Any]]
    messages: list[np.ndarray]
    shards: list[np.ndarray]
    copies: list[jax.Array] = field(default_factory=list)
    sent: bool = False


class _MpiChannel:
    """Moves one transfer between ranks. See `base.Channel`."""

    def __init__(
        self, transfer: Transfer, tag: int, depth: int, mailbox: Mailbox, pool: BufferPool
    ):
        self._name = transfer.name
        self._tag = tag
        self._mailbox = mailbox
        self._pool = pool
        sources = tuple(map(data_layout, transfer.sources))
        targets = tuple(map(data_layout, transfer.targets))
        self._plan = exchange(sources, targets, mailbox.rank)
        self._finders = [ShardFinder(transfer.name, layout) for layout in sources]
        self._assembly = Assembly(self._plan, targets)
        self._keys = [value for value, layout in enumerate(transfer.sources) if is_key(layout)]
        self._wrappers = [key_wrapper(transfer.targets[value]) for value in self._keys]
        self._has_local = bool(self._plan.copies) or any(a.cuts for a in self._plan.arrivals)
        self._instances: dict[int, _Instance] = {}
        # MPI must not write to memory that went away together with a channel.
        weakref.finalize(self, _cancel, mailbox, self._instances).atexit = False
        for message in self._plan.incoming:
            pool.reserve(message.nbytes, depth)
        for arrival in self._plan.arrivals:
            if arrival.in_place is None:
                pool.reserve(arrival.nbytes, depth)

    def post(self, microbatch: int) -> None:
        """Starts to receive the bundle of a microbatch."""
        self._mailbox.collect()
        if self._plan.incoming:
            self._instance(microbatch)

    def send(self, microbatch: int, arrays: Sequence[jax.Array]) -> None:
        """Copies what stays on this rank, and starts to send what other ranks need."""
        arrays = list(arrays)
        for value in self._keys:
            arrays[value] = jax.random.key_data(arrays[value])
        if self._has_local:
            self._send_here(self._instance(microbatch), arrays)
        for message in self._plan.outgoing:
            payload = self._payload(message, arrays)
            self._mailbox.send(payload, message.target, self._tag, self._name, microbatch)
        self._mailbox.collect()

    def take(self, microbatch: int) -> list[jax.Array]:
        """Waits for the bundle of a microbatch and assembles it."""
        instance = self._instance(microbatch)
        self._wait(microbatch, instance)
        del self._instances[microbatch]
        for number, arrival in enumerate(self._plan.arrivals):
            for message, part in arrival.parts:
                place = instance.shards[number][part.piece.place]
                np.copyto(place, part.view(instance.messages[message]))
        arrays = self._assembly.arrays(instance.shards, instance.copies)
        for value, wrap in zip(self._keys, self._wrappers, strict=True):
            arrays[value] = wrap(arrays[value])
        return arrays

    def cancel(self) -> None:
        """Gives up what was posted and not taken."""
        _cancel(self._mailbox, self._instances)

    def _instance(self, microbatch: int) -> _Instance:
        """The instance of a microbatch; its receives are posted when it is first asked for."""
        instance = self._instances.get(microbatch)
        if instance is None:
            instance = self._instances[microbatch] = self._start()
        return instance

    def _start(self) -> _Instance:
        messages = [self._pool.lease(message.nbytes) for message in self._plan.incoming]
        requests = [
            self._mailbox.receive(buffer, message.source, self._tag)
            for buffer, message in zip(messages, self._plan.incoming, strict=True)
        ]
        shards = [
            self._pool.lease(arrival.nbytes).view(arrival.dtype).reshape(arrival.shape)
            if arrival.in_place is None
            else arrival.in_place[1].view(messages[arrival.in_place[0]])
            for arrival in self._plan.arrivals
        ]
        return _Instance(requests, messages, shards)

    def _send_here(self, instance: _Instance, arrays: list[jax.Array]) -> None:
        """Copies the pieces whose source and target are both on this rank."""
        copies = self._assembly.copies
        instance.copies = jax.device_put(
            [self._shard(arrays, copy.value, copy.source) for copy in copies],
            [copy.destination for copy in copies],
        )
        for number, arrival in enumerate(self._plan.arrivals):
            for piece in arrival.cuts:
                cut = self._host(arrays, arrival.value, piece)
                np.copyto(instance.shards[number][piece.place], cut)
        instance.sent = True

    def _payload(self, message: Message, arrays: list[jax.Array]) -> np.ndarray:
        """The bytes of a message: those of its only piece where they lie together, else a copy."""
        cuts = [self._host(arrays, part.value, part.piece) for part in message.parts]
        if len(cuts) == 1 and cuts[0].flags.c_contiguous:
            return cuts[0].reshape(-1).view(np.uint8)
        payload = self._pool.lease(message.nbytes)
        for part, cut in zip(message.parts, cuts, strict=True):
            np.copyto(part.view(payload), cut)
        return payload

    def _host(self, arrays: list[jax.Array], value: int, piece: Piece) -> np.ndarray:
        """A piece in host memory: on CPU a view, and the array's memory lives as long as it."""
        shard = np.asarray(self._shard(arrays, value, piece.source))
        return shard if piece.cut_whole else shard[piece.cut]

    def _shard(self, arrays: list[jax.Array], value: int, device: jax.Device) -> jax.Array:
        return self._finders[value].find(arrays[value], device)

    def _wait(self, microbatch: int, instance: _Instance) -> None:
        """Waits for the messages of an instance."""
        if self._has_local and not instance.sent:
            raise StallError(
                f"{self._name}: rank {self._mailbox.rank} took microbatch {microbatch} before it "
                "sent its own part. The instructions of this rank are out of order."
            )
        requests = [request for each in instance.requests for request in each]
        self._mailbox.wait(requests, lambda: self._late(microbatch, instance))

    def _late(self, microbatch: int, instance: _Instance) -> Wait:
        """What has not come yet."""
        late = {
            message.source
            for message, requests in zip(self._plan.incoming, instance.requests, strict=True)
            if not self._mailbox.done(requests)
        }
        until = f"send microbatch {microbatch} of {self._name} to rank {self._mailbox.rank}"
        return Wait(tuple(sorted(late)), until)


def _cancel(mailbox: Mailbox, instances: dict[int, _Instance]) -> None:
    """Gives up the receives of all instances."""
    for instance in instances.values():
        for requests in instance.requests:
            mailbox.cancel(requests)
    instances.clear()


def _processes(transfer: Transfer) -> set[int]:
    """The processes that take part."""
    layouts = transfer.sources + transfer.targets
    return {block.process for layout in layouts for block in blocks(layout)}
