"""The hosts that a job runs on: `--hosts n1:2,n2:2` and host files."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from multimesh.errors import StartupError
from multimesh.launch.addresses import LOOPBACK, address_towards

__all__ = ["Host", "addresses_for", "fill", "is_here", "parse_hosts", "read_hostfile"]

_FORMS = "n1:2,n2:2 (a host and its number of ranks), or n1,n2 for one rank on each"


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that have a place on it."""

    name: str
    places: int = 1

    def __str__(self) -> str:
        """As in `--hosts`, and as both MPIs write it: `n1:2`."""
        return f"{self.name}:{self.places}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses `n1:2,n2:2`.

    Raises:
      StartupError: It cannot be understood, or names a host twice.
    """
    return _check([_parse(word, f"--hosts {text}") for word in text.split(",")], f"--hosts {text}")


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Reads a file with a host in each line: `n1`, `n1:2` or `n1 slots=2`; `#` starts a comment.

    Raises:
      StartupError: The file cannot be read or understood, or names a host twice.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise StartupError(f"The host file {path!r} cannot be read: {exc}.") from exc
    lines = [line.partition("#")[0].strip() for line in lines]
    source = f"the host file {path!r}"
    return _check([_parse(line, source) for line in lines if line], source)


def fill(hosts: Iterable[Host], ranks: int | None) -> tuple[Host, ...]:
    """Gives ranks to the hosts in their order, each as many as it has places.

    Args:
      hosts: The hosts.
      ranks: Number of ranks, or None for one in every place.

    Returns:
      The hosts that get ranks, with exactly as many places.

    Raises:
      StartupError: There are fewer places than ranks.
    """
    hosts = tuple(hosts)
    places = sum(host.places for host in hosts)
    ranks = places if ranks is None else ranks
    if ranks > places:
        each = ", ".join(map(str, hosts))
        raise StartupError(
            f"Expected at least {ranks} places for -n {ranks}. Got {places} on {each}. Name more "
            "hosts, or give them more places (`n1:4`; a host may have more ranks than cores)."
        )
    used = []
    for host in hosts:
        share = min(host.places, ranks)
        ranks -= share
        if share:
            used.append(replace(host, places=share))
    return tuple(used)


def is_here(name: str) -> bool:
    """Whether a name means this host."""
    own = socket.gethostname()
    return name in ("localhost", LOOPBACK, own, own.partition(".")[0])


def addresses_for(hosts: Iterable[str]) -> tuple[str, ...]:
    """The addresses under which other hosts reach this one; none if there are no others.

    Raises:
      StartupError: A host's name cannot be resolved, or there is no route to it.
    """
    addresses = []
    for host in hosts:
        if not is_here(host):
            try:
                addresses.append(address_towards(host))
            except OSError as exc:
                raise StartupError(
                    f"The host {host!r} cannot be reached from {socket.gethostname()}: {exc}. "
                    "Check the name, and that it is in DNS or /etc/hosts."
                ) from exc
    return tuple(dict.fromkeys(addresses))


def _parse(text, source):
    # `slots=2` is what Open MPI's host files say, `:2` MPICH's.
    words = text.replace("slots=", ":").replace(" ", "").split(":")
    name, places = words[0], words[1] if len(words) > 1 else "1"
    if len(words) > 2 or not name or name.startswith("-") or not places.isdecimal():
        raise StartupError(f"Expected hosts like {_FORMS}. Got {text!r} in {source}.")
    if int(places) == 0:
        raise StartupError(f"A host needs at least one place. Got {text!r} in {source}.")
    return Host(name, int(places))


def _check(hosts, source):
    if not hosts:
        raise StartupError(f"Expected at least one host in {source}. Write {_FORMS}.")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise StartupError(f"The host {name!r} is named twice in {source}. Add up its places.")
    return tuple(hosts)
