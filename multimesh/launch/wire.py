"""The messages between the ranks and mmrun, over a socket that mmrun listens on.

A rank's supervisor keeps one connection for the output and the end of its rank; the rank itself
opens a short one for each thing that only it knows. A message is a header (kind, rank, length)
and a payload, so a rank's output arrives byte for byte and in order, whatever the MPI's own
forwarding of output would have done to it.

The socket is a Unix socket where all ranks are on mmrun's host. Across hosts it is TCP, which
anybody on the network can connect to: there each connection starts with a secret of the job.
"""

import enum
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from multimesh.launch.environment import detect_launcher

__all__ = [
    "ADDRESS_VARIABLE",
    "Endpoint",
    "Kind",
    "Message",
    "Parser",
    "connect",
    "listen_here",
    "listen_on_network",
    "notice_loss",
    "notify",
    "send",
]

# Not a setting: mmrun tells its ranks where it listens.
ADDRESS_VARIABLE = "MULTIMESH_MMRUN"

_HEADER = struct.Struct("!BII")
_CONNECT_SECONDS = 10
# Probes after 5 s without traffic; 20 s (in ms) for what was sent and not acknowledged.
_LOSS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Kind(enum.IntEnum):
    """What a message says."""

    HELLO = 1  # JSON {host, is_python}: the supervisor is up; only Python says FINISHED
    OUTPUT = 2  # bytes of the rank's standard output
    ERRORS = 3  # bytes of the rank's standard error
    JOINING = 4  # JSON {timeout}: the rank called init and waits for the others
    FAILING = 5  # JSON {code, traceback, culprit}: an exception is about to end the rank
    FINISHED = 6  # the program ran to its end
    EXIT = 7  # JSON {code, signal}: the rank's process is gone; the rest of its output follows
    STOPPED = 8  # JSON {signal}: the rank's process was stopped by it, or goes on again (0)
    NOTICE = 9  # JSON {signal}: a preemption notice came to the rank, and not from mmrun
    # From mmrun to a supervisor:
    PREEMPT = 10  # give the rank a preemption notice
    INTERRUPT = 11  # interrupt the rank, as Ctrl-C does


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
    """Turns the bytes of one connection back into messages.

    Args:
      secret: What the connection must start with.
    """

    def __init__(self, secret: bytes = b""):
        self._secret = secret
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next bytes, and returns the messages that they complete.

        Raises:
          PermissionError: The connection does not start with the secret of the job.
        """
        self._buffer += data
        if self._secret:
            start = self._buffer[: len(self._secret)]
            if not self._secret.startswith(start):
                raise PermissionError("a stranger connected: it does not know the job's secret")
            if len(start) < len(self._secret):
                return []
            del self._buffer[: len(start)]
            self._secret = b""
        messages = []
        while len(self._buffer) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(Message(Kind(kind), rank, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages


@dataclass(frozen=True)
class Endpoint:
    """Where mmrun listens.

    Attributes:
      listener: The listening socket.
      address: For `ADDRESS_VARIABLE`: `unix:PATH`, or `tcp:SECRET@HOST:PORT,HOST:PORT...`.
      secret: What each connection starts with.
    """

    listener: socket.socket
    address: str
    secret: bytes = b""


def listen_here(path: str) -> Endpoint:
    """Listens for ranks of this host, on a Unix socket at `path`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(4096)
    return Endpoint(listener, f"unix:{path}")


def listen_on_network(hosts: Sequence[str]) -> Endpoint:
    """Listens for ranks of any host, on a free TCP port.

    Args:
      hosts: The addresses under which ranks may find this host; they try them in turn.
    """
    listener = socket.create_server(("", 0), backlog=4096)
    secret = os.urandom(16).hex()
    port = listener.getsockname()[1]
    places = ",".join(f"{host}:{port}" for host in hosts)
    return Endpoint(listener, f"tcp:{secret}@{places}", secret.encode())


def connect() -> socket.socket:
    """Connects to the mmrun that started this rank.

    Returns:
      A connection, ready for `send`.

    Raises:
      OSError: There is no mmrun, or it cannot be reached.
    """
    kind, _, rest = os.environ.get(ADDRESS_VARIABLE, "").partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(rest)
        return connection
    if kind != "tcp":
        raise ConnectionError("no mmrun started this process")
    secret, _, places = rest.partition("@")
    connection = _connect_to_any(places.split(","))
    connection.sendall(secret.encode())
    return connection


def _connect_to_any(places):
    for number, place in enumerate(places, 1):
        host, _, port = place.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError:
            if number == len(places):
                raise
        else:
            connection.settimeout(None)
            notice_loss(connection)
            return connection
    raise ConnectionError("mmrun gave no address")


def notice_loss(connection: socket.socket):
    """Makes a connection fail soon after the other host or the link to it is gone.

    Nothing arrives from a host that is gone; without this its connection would seem alive.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _LOSS.items():
            if hasattr(socket, name):  # each system has its own selection
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
    launcher = detect_launcher()
    if launcher is None:
        return False
    try:
        with connect() as connection:
            send(connection, kind, launcher.rank, payload)
    except OSError:
        return False
    return True
