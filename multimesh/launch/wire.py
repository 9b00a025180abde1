"""The messages that ranks send to mmrun, over a Unix socket that mmrun listens on.

A rank's supervisor keeps one connection for the output and the end of its rank; the rank itself
opens a short one for each thing that only it knows. A message is a header (kind, rank, length)
and a payload, so a rank's output arrives byte for byte and in order, whatever the MPI's own
forwarding of output would have done to it.
"""

import enum
import json
import os
import socket
import struct
from dataclasses import dataclass

from multimesh.launch.environment import detect_launcher

__all__ = ["ADDRESS_VARIABLE", "Kind", "Message", "Parser", "notify", "send"]

# Not a setting: mmrun tells its ranks where it listens.
ADDRESS_VARIABLE = "MULTIMESH_MMRUN"

_HEADER = struct.Struct("!BII")


class Kind(enum.IntEnum):
    """What a message says."""

    HELLO = 1  # JSON {host, is_python}: the supervisor is up; only Python says FINISHED
    OUTPUT = 2  # bytes of the rank's standard output
    ERRORS = 3  # bytes of the rank's standard error
    JOINING = 4  # JSON {timeout}: the rank called init and waits for the others
    FAILING = 5  # JSON {code, traceback}: an exception is about to end the rank
    FINISHED = 6  # the program ran to its end
    EXIT = 7  # JSON {code, signal}: the rank's process is gone; the rest of its output follows


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
      kind: What it says.
      rank: The rank that it is about.
      payload: Raw bytes; see `Kind`.
    """

    kind: Kind
    rank: int
    payload: bytes

    def json(self) -> dict:
        """The payload of a message that carries JSON."""
        return json.loads(self.payload)


class Parser:
    """Turns the bytes of one connection back into messages."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next bytes, and returns the messages that they complete."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(Message(Kind(kind), rank, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages


def send(connection: socket.socket, kind: Kind, rank: int, payload: bytes | str | dict = b""):
    """Sends one message; a dict travels as JSON."""
    if isinstance(payload, dict):
        payload = json.dumps(payload)
    if isinstance(payload, str):
        payload = payload.encode(errors="backslashreplace")
    connection.sendall(_HEADER.pack(kind, rank, len(payload)) + payload)


def notify(kind: Kind, payload: bytes | str | dict = b"") -> bool:
    """Tells mmrun something about this rank, on a connection of its own.

    Returns:
      Whether mmrun was told: False without mmrun, or when it is gone.
    """
    address, launcher = os.environ.get(ADDRESS_VARIABLE), detect_launcher()
    if not address or launcher is None:
        return False
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
            send(connection, kind, launcher.rank, payload)
        except OSError:
            return False
    return True
