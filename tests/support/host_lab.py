"""Two emulated hosts on this machine: `mm1` and `mm2`, each with a network of its own.

A host is a network namespace with one address on a common bridge. What runs on it sees its own
host name and /etc/hosts; files and processes are those of the machine. All of it is named after
this process, in a network reserved for tests, and gone when the lab is closed; what a killed
process has left is removed by the next.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HOSTS", "HostLab", "open_hosts"]

HOSTS = ("mm1", "mm2")
# on HOST COMMAND...: in the host's network, with its name and its /etc/hosts.
_ON = """#!/bin/sh
host=$1; shift
exec nsenter --net=/run/netns/$host-{tag} unshare --uts --mount sh -c \\
    'hostname "$0"; mount --bind "{folder}/hosts.$0" /etc/hosts; exec "$@"' "$host" "$@"
"""
# rsh [OPTIONS] HOST COMMAND LINE...: what MPI expects of ssh.
_RSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec "{folder}/on" "$host" /bin/sh -c "$*"
"""


class HostLab:
    """The two hosts. Use `open_hosts`.

    Attributes:
      rsh: Path of a command that reaches a host as ssh would.
      addresses: Of each host.
      gateway: The machine's own address in the hosts' network.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._tag = os.getpid()
        network = f"198.18.{os.getpid() % 256}"  # reserved for tests (RFC 2544)
        self.addresses = dict(zip(HOSTS, (f"{network}.11", f"{network}.12"), strict=True))
        self.gateway = f"{network}.1"
        self.rsh = folder / "rsh"

    def on(self, host: str, *words) -> list[str]:
        """The command line that runs `words` on a host."""
        return [str(self._folder / "on"), host, *map(str, words)]

    def bytes_from(self, host: str) -> int:
        """Number of bytes that a host has sent to the network."""
        # What the host sends, its end on the bridge receives.
        return int(Path(f"/sys/class/net/{self._port(host)}/statistics/rx_bytes").read_text())

    @contextlib.contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """Takes the link of a host down for a while."""
        _ip("link", "set", self._port(host), "down")
        try:
            yield
        finally:
            _ip("link", "set", self._port(host), "up")

    @contextlib.contextmanager
    def own_name_is_loopback(self, host: str) -> Iterator[None]:
        """Gives a host Debian's line for its own name, `127.0.1.1 HOST`."""
        path = self._folder / f"hosts.{host}"
        before = path.read_text()
        # Rewritten in place: running processes have this very file as their /etc/hosts.
        path.write_text(before.replace(f"{self.addresses[host]} {host}", f"127.0.1.1 {host}"))
        try:
            yield
        finally:
            path.write_text(before)

    def open(self):
        """Creates the hosts."""
        names = "".join(f"{address} {host}\n" for host, address in self.addresses.items())
        for name, text in (("on", _ON), ("rsh", _RSH)):
            path = self._folder / name
            path.write_text(text.format(tag=self._tag, folder=self._folder))
            path.chmod(0o755)
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host, address in self.addresses.items():
            (self._folder / f"hosts.{host}").write_text(f"127.0.0.1 localhost\n{names}")
            space, port = self._space(host), self._port(host)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "default", "via", self.gateway)

    def close(self):
        """Removes the hosts, or what has come to be of them."""
        _remove(self._tag)

    def _space(self, host):
        return f"{host}-{self._tag}"

    def _port(self, host):
        return f"{host}-{self._tag}"  # at most 15 characters: a pid has 7

    @property
    def _bridge(self):
        return f"mm-{self._tag}"


@contextlib.contextmanager
def open_hosts(folder: Path) -> Iterator[HostLab]:
    """Creates two hosts, and removes them in the end.

    Args:
      folder: An empty folder for their files.

    Raises:
      OSError: They cannot be had here; the message says why.
    """
    if os.geteuid():
        raise PermissionError("network namespaces need root")
    for space in Path("/run/netns").glob(f"{HOSTS[0]}-*"):
        tag = space.name.rpartition("-")[2]
        if not Path(f"/proc/{tag}").exists():
            _remove(tag)
    lab = HostLab(folder)
    try:
        lab.open()
        # The last thing that may be forbidden: a name and an /etc/hosts of its own.
        _run(lab.on(HOSTS[0], "true"))
        yield lab
    finally:
        lab.close()


def _remove(tag):
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", f"{host}-{tag}"], capture_output=True)
    subprocess.run(["ip", "link", "del", f"mm-{tag}"], capture_output=True)


def _ip(*words):
    _run(["ip", *words])


def _run(command):
    """Runs a command; what goes wrong is an OSError."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
