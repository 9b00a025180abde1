"""Judges what the probes found: each function turns facts into one line of the doctor's table.

Nothing here looks at the machine, so every finding can be tested without having it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from multimesh.launch.mmrun.doctor.probes import Ended, Interpreter
from multimesh.launch.topology import Core

__all__ = [
    "Check",
    "check_cores",
    "check_gpus",
    "check_host",
    "check_job",
    "check_loopback",
    "check_own_name",
    "check_packages",
    "check_proxies",
    "check_python",
    "check_shared_memory",
    "check_slurm",
]

_SMALLEST_SHARED_MEMORY = 256 << 20
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
      name: What was checked.
      verdict: "error" if no job can run like this, "warning" if it may run badly.
      found: What there is.
      advice: What to do about it.
    """

    name: str
    verdict: Literal["ok", "warning", "error"]
    found: str
    advice: str = ""


def check_python(version: str, required: str, executable: str) -> Check:
    """Whether Python is new enough, such as "3.11.7" for ">=3.11"."""
    found = f"{version}, {executable}"
    if _numbers(version) >= _numbers(required):
        return Check("Python", "ok", found)
    advice = f"multimesh needs Python {required}: make an environment with a newer one."
    return Check("Python", "error", found, advice)


def check_packages(versions: Mapping[str, str | None], required: Mapping[str, str]) -> Check:
    """Whether every package is there and new enough.

    Args:
      versions: The version of each package, or None where it is missing.
      required: The bound of each package, such as ">=4.0".
    """
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    wanted = [
        f"'{name}{bound}'"
        for name, bound in required.items()
        if _numbers(versions.get(name) or "") < _numbers(bound)
    ]
    if wanted:
        return Check("packages", "error", found, f"pip install {' '.join(wanted)}")
    return Check("packages", "ok", found)


def check_slurm(is_inside: bool, kind: str, pmis: frozenset[str], default: str) -> Check:
    """Whether SLURM's srun can start ranks of this MPI.

    Args:
      is_inside: Whether mmrun runs inside a SLURM job.
      kind: The MPI that mpi4py loads, "openmpi" or "mpich".
      pmis: The PMI types of `srun --mpi=list`.
      default: The cluster's MpiDefault, or "unknown".
    """
    name, pmi = {"openmpi": ("Open MPI", "pmix"), "mpich": ("MPICH", "pmi2")}[kind]
    where = "inside a job" if is_inside else "no job"
    found = f"{where}; srun --mpi has {', '.join(sorted(pmis)) or 'no PMI'}, default {default}"
    if pmi not in pmis:
        advice = (
            f"srun cannot start {name}, which needs {pmi}; mmrun then uses mpiexec. To use srun, "
            f"have SLURM's {pmi} plug-in installed, or another MPI."
        )
        return Check("SLURM", "warning", found, advice)
    if default == pmi or not is_inside:
        return Check("SLURM", "ok", found)
    return Check("SLURM", "ok", found, f"Without mmrun, write `srun --mpi={pmi}`, for {name}.")


def check_loopback(error: str | None) -> Check:
    """Whether processes of this host can connect to each other."""
    if error is None:
        return Check("ports", "ok", "a free port of 127.0.0.1 can be reached")
    advice = "Ranks of one host meet at 127.0.0.1: allow it (`ip link set lo up`, firewall)."
    return Check("ports", "error", f"127.0.0.1 cannot be reached: {error}", advice)


def check_proxies(environ: Mapping[str, str]) -> Check:
    """Whether a proxy could catch the traffic between ranks."""
    found = [name for name in environ if name.lower() in _PROXIES and environ[name]]
    if not found:
        return Check("proxies", "ok", "none in the environment")
    return Check("proxies", "ok", f"{', '.join(sorted(found))}: not used between ranks")


def check_shared_memory(total: int | None, free: int | None) -> Check:
    """Whether /dev/shm, through which ranks of one host talk, is large enough.

    Args:
      total: Its size in bytes, or None if there is none.
      free: What is left of it, in bytes.
    """
    advice = "In a container, start it with --shm-size=1g or --ipc=host."
    if total is None or free is None:
        return Check("/dev/shm", "warning", "there is none", advice)
    found = f"{free >> 20} of {total >> 20} MiB free"
    if free < _SMALLEST_SHARED_MEMORY:
        advice = f"MPI's messages within a host may not fit. {advice} Remove old files in it."
        return Check("/dev/shm", "warning", found, advice)
    return Check("/dev/shm", "ok", found)


def check_own_name(host: str, addresses: Sequence[str], several_hosts: bool) -> Check:
    """Whether this host's name leads to this host for others as well.

    Args:
      host: This host's name.
      addresses: What the name resolves to on this host; empty if to nothing.
      several_hosts: Whether the job is to run on several hosts.
    """
    found = f"{host} is {', '.join(addresses) if addresses else 'not known'} here"
    is_trap = not addresses or any(map(_is_loopback, addresses))
    if not is_trap:
        return Check("own name", "ok", found)
    if not several_hosts:
        return Check("own name", "ok", f"{found}: no matter on one host")
    advice = (
        "Ranks under multimesh.init do not ask for it. Other programs on several hosts, also "
        f"plain JAX with gloo, would have other hosts connect to themselves: in /etc/hosts of "
        f"{host}, give its network address in the line of {host}."
    )
    return Check("own name", "warning", found, advice)


def check_cores(cores: Sequence[Core], quota: float | None, ranks: int) -> Check:
    """Whether the ranks of this host have cores.

    Args:
      cores: The cores that this process may use.
      quota: How many cores' worth of time a container may use, or None.
      ranks: Number of ranks on this host.
    """
    nodes = len({core.node for core in cores})
    found = f"{len(cores)} for {ranks} ranks, in {nodes} NUMA node{'s'[: nodes > 1]}"
    if quota is not None and quota < len(cores):
        advice = (
            "The container's CPU quota is not seen by XLA, which makes a thread for each core: "
            "start the container with --cpuset-cpus in place of --cpus."
        )
        return Check("cores", "warning", f"{found}, time for {quota:g} only", advice)
    if len(cores) < ranks:
        advice = "Ranks share cores and wait for each other: good for trying out, not for speed."
        return Check("cores", "warning", found, advice)
    return Check("cores", "ok", found)


def check_gpus(found: int, is_usable: bool, ranks: int, each: int) -> Check:
    """Whether the ranks of this host have GPUs.

    Args:
      found: Number of GPUs that ranks see.
      is_usable: Whether JAX has its plug-in for them.
      ranks: Number of ranks on this host.
      each: GPUs for each rank.
    """
    if not found:
        return Check("GPUs", "ok", "none: CPU devices")
    if not is_usable:
        advice = 'JAX uses CPU devices. For GPUs, pip install "jax[cuda13]" (or cuda12).'
        return Check("GPUs", "warning", f"{found}, but JAX has no plug-in for them", advice)
    text = f"{found} for {ranks} ranks"
    if found < ranks * each:
        advice = f"With {each} each, {found // each} ranks can run here; or use CPU devices."
        return Check("GPUs", "warning", text, advice)
    return Check("GPUs", "ok", text)


def check_host(host: str, mine: Interpreter, theirs: Interpreter | str, error: str | None) -> Check:
    """Whether another host can take ranks.

    Args:
      host: Its name.
      mine: The ranks' Python on this host.
      theirs: The same on the other host, or why that is not known.
      error: Why the host's name cannot be resolved here, or None.
    """
    name = f"host {host}"
    if isinstance(theirs, str):
        advice = f"`ssh {host} true`, or the command of --rsh, must work without a password."
        return Check(name, "error", theirs, advice)
    found = f"reached, Python {theirs.version}"
    if error:
        advice = f"Give {host} an address that all hosts know: in DNS, or in /etc/hosts of each."
        return Check(name, "error", f"{found}, but its name is not known here: {error}", advice)
    if theirs.package is None:
        advice = f"{theirs.executable} on {host} does not find multimesh: install it there."
        return Check(name, "error", found, advice)
    versions = {"Python": mine.version, **mine.versions}
    others = {"Python": theirs.version, **theirs.versions}
    differences = [
        f"{package} {others.get(package)} (here {version})"
        for package, version in versions.items()
        if others.get(package) != version
    ]
    if differences:
        advice = "Ranks must run the same program: install the same versions on every host."
        return Check(name, "error", f"{found}; {', '.join(differences)}", advice)
    return Check(name, "ok", f"{found}, the same packages")


def check_job(ended: Ended) -> Check:
    """Whether a small job ran: its ranks met in MPI and in JAX."""
    if ended.code == 0:
        return Check(
            "test job", "ok", f"2 ranks met in MPI and in JAX within {ended.seconds:.1f} s"
        )
    found = "did not end in time" if ended.code is None else f"ended with code {ended.code}"
    advice = "\n".join(ended.output.splitlines()[-12:])
    return Check("test job", "error", f"{found} after {ended.seconds:.1f} s; it said:", advice)


def _numbers(version):
    """The numbers of "0.10.2" or ">=0.10", to compare; a pre-release counts as its release."""
    parts = version.lstrip(">= ").split(".")[:3]
    return [int(number[0]) for part in parts if (number := re.match(r"\d+", part))]


def _is_loopback(address):
    return address.startswith("127.") or address == "::1"
