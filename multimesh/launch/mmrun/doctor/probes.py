"""Looks at the machine. Nothing here takes longer than its time limit, whatever is broken."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Ended",
    "Interpreter",
    "allowed_cores",
    "ask_interpreter",
    "requirements",
    "resolution_error",
    "run_limited",
    "shared_memory",
    "try_loopback",
]

_PROBE_SECONDS = 8
# Runs in the ranks' Python, here and on other hosts, where multimesh may be missing.
_QUESTIONS = """
import importlib.metadata, importlib.util, json, platform, socket, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def addresses():
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return sorted({address[0] for *_, address in found})
    except OSError:
        return []
spec = importlib.util.find_spec("multimesh")
print(json.dumps({
    "version": platform.python_version(),
    "executable": sys.executable,
    "versions": {name: version(name) for name in sys.argv[1:]},
    "package": spec and spec.origin,
    "host": socket.gethostname(),
    "addresses": addresses(),
}))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its code (None if it was stopped), its output, and how long it took."""

    code: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Interpreter:
    """The ranks' Python on one host.

    Attributes:
      version: Python's version.
      executable: Its path.
      versions: The versions of the packages that multimesh needs; None for a missing one.
      package: Where it finds multimesh, or None.
      host: The host's name.
      addresses: What that name resolves to on the host itself.
    """

    version: str
    executable: str
    versions: Mapping[str, str | None]
    package: str | None
    host: str
    addresses: Sequence[str]


def run_limited(
    command: Sequence[str], seconds: float = _PROBE_SECONDS, environ: Mapping | None = None
) -> Ended:
    """Runs a command, and kills it with all that it has started when its time is over.

    Args:
      command: The command line.
      seconds: The time limit.
      environ: Its environment, or None for this process's own.
    """
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        )
    except OSError as exc:
        return Ended(127, str(exc), 0.0)
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Ended(code, output, time.monotonic() - start)


def ask_interpreter(
    interpreter: str, packages: Sequence[str], host: str | None = None, rsh: str | None = None
) -> Interpreter | str:
    """Asks the ranks' Python about itself.

    Args:
      interpreter: Its path.
      packages: The packages whose versions matter.
      host: Another host to ask on, or None for this one.
      rsh: What reaches it, or None for ssh.

    Returns:
      The answer, or why there is none.
    """
    command = [interpreter, "-c", _QUESTIONS, *packages]
    if host is not None:
        path = os.environ.get("PYTHONPATH")
        if path:
            command = ["env", f"PYTHONPATH={path}", *command]
        # A question for a password would wait for an answer that nobody gives.
        reach = shlex.split(rsh) if rsh else ["ssh", "-o", "BatchMode=yes"]
        command = [*reach, host, shlex.join(command)]
    ended = run_limited(command)
    lines = ended.output.strip().splitlines() or ["no answer"]
    if ended.code is None:
        return f"no answer within {_PROBE_SECONDS} s: {lines[-1]}"
    if ended.code != 0:
        return f"{command[0]} ended with code {ended.code}: {lines[-1]}"
    try:
        return Interpreter(**json.loads(lines[-1]))
    except ValueError:
        return f"expected an answer of {interpreter}, got {lines[-1]!r}"


def requirements() -> tuple[str, dict[str, str]]:
    """What multimesh needs: Python's version, and the bound of each package.

    Returns:
      Such as `(">=3.11", {"jax": ">=0.9.2"})`, of the installed package or this checkout.
    """
    project = Path(__file__).parents[4] / "pyproject.toml"
    if project.exists():
        table = tomllib.loads(project.read_text())["project"]
        python, needs = table["requires-python"], table["dependencies"]
    else:
        metadata = importlib.metadata.metadata("multimesh")
        python, needs = metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    needs = [need for need in needs if "extra ==" not in need]
    matches = (re.match(r"([\w.-]+)\s*(>=\s*[\w.]+)", need) for need in needs)
    return python, {match[1]: match[2] for match in matches if match}


def allowed_cores() -> set[int]:
    """Linux's numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def try_loopback() -> str | None:
    """Has this process connect to itself; returns what went wrong, or None."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PROBE_SECONDS)
            with socket.create_connection(listener.getsockname(), timeout=_PROBE_SECONDS):
                listener.accept()[0].close()
    except OSError as exc:
        return str(exc)
    return None


def shared_memory() -> tuple[int | None, int | None]:
    """The size of /dev/shm and what is free of it, in bytes; None where there is none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


def resolution_error(host: str) -> str | None:
    """Why a host's name cannot be resolved on this host, or None."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as exc:
        return str(exc)
    return None
