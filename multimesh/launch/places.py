"""Where each rank of a job runs, and at which address the other hosts reach it.

No name of a host is looked up on that host itself: the answer is often a loopback address
(`127.0.1.1` on Debian), and other hosts would then connect to themselves.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import StartupError
from multimesh.launch.addresses import LOOPBACK, address_towards

__all__ = ["Place", "check_routes", "meeting_address", "own_place", "ranks_at"]

# Addresses reserved for documentation: nobody is there, and the way to them is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Place:
    """What ranks share that can meet at a loopback address.

    Attributes:
      host: The host's name.
      network: What tells its network from those of other hosts, and of other containers on it.
    """

    host: str
    network: str = ""


def own_place() -> Place:
    """The place of this process."""
    try:  # two hosts may have one name: containers, or machines made from one image
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        network = ""
    return Place(socket.gethostname(), network)


def ranks_at(place: Place, places: Sequence[Place]) -> list[int]:
    """The ranks that are at a place.

    Args:
      place: The place.
      places: The place of each rank.
    """
    return [rank for rank, other in enumerate(places) if other == place]


def meeting_address(place: Place, places: Sequence[Place]) -> str:
    """The address at which ranks at `place` are reached by all others.

    Args:
      place: The place of this process.
      places: The place of each rank.

    Returns:
      A loopback address if all ranks are here; else that of this host towards another.

    Raises:
      StartupError: This host has no address but loopback ones.
    """
    others = dict.fromkeys(other.host for other in places if other != place)
    if not others:
        return LOOPBACK
    # A name that is not known here, or known as a loopback address, leads nowhere.
    for destination in (*others, *_ANYWHERE):
        try:
            address = address_towards(destination)
        except OSError:
            continue
        if not address.startswith("127.") and address != "::1":
            return address
    raise StartupError(
        f"{place.host} has no network address at which {', '.join(others)} could reach it. "
        "Connect the hosts by a network, and make their names known to each other (/etc/hosts)."
    )


def check_routes(communicator, places: Sequence[Place], address: str):
    """Has every host connect once to every other, before anything depends on it.

    Collective. What connects later would wait for its timeout, and then end the process.

    Args:
      communicator: One over all ranks.
      places: The place of each rank.
      address: The address of this rank's host.

    Raises:
      StartupError: Some hosts cannot connect to others. All ranks raise the same error.
    """
    rank = communicator.Get_rank()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(places)) as listener:
        listeners = communicator.allgather(listener.getsockname()[:2])
        failures = []
        if rank == ranks_at(places[rank], places)[0]:  # one rank speaks for its host
            for other in sorted({ranks_at(place, places)[0] for place in places} - {rank}):
                failures += _try_route(places[rank], places[other], listeners[other])
        everywhere = [text for texts in communicator.allgather(failures) for text in texts]
    if everywhere:
        raise StartupError(
            f"Some hosts of this job cannot connect to others: {'; '.join(everywhere)}. Every "
            "host must reach every other on any TCP port: check that no firewall is between "
            "them, and that these addresses belong to a network that they share."
        )


def _try_route(source, target, listener):
    """Connects once; returns what went wrong as a list of at most one sentence."""
    try:
        socket.create_connection(listener, timeout=_CONNECT_SECONDS).close()
    except OSError as exc:
        return [f"{source.host} to {target.host} at {listener[0]} ({exc})"]
    return []
