"""Under which address other hosts reach this one."""

import socket

__all__ = ["LOOPBACK", "address_towards"]

LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """The address of this host on its route to another one.

    Never a look-up of the own name, which often gives a loopback address (`127.0.1.1` on Debian).
    Connecting a UDP socket sends nothing; it chooses the route, and so the address.

    Args:
      host: Name or address of the other host.

    Returns:
      An address, IPv4 where the other host has one.

    Raises:
      OSError: The name cannot be resolved, or there is no route.
    """
    candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    candidates.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
    family, kind, protocol, _, address = candidates[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
