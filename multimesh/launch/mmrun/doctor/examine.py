"""Which checks there are, in their order, and the table that they are shown in."""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from multimesh.errors import StartupError
from multimesh.launch.gpus import count_gpus, find_gpus, jax_can_use_gpus
from multimesh.launch.mmrun import slurm
from multimesh.launch.mmrun.choice import choose
from multimesh.launch.mmrun.command import parse_program
from multimesh.launch.mmrun.doctor import checks, probes
from multimesh.launch.mmrun.doctor.checks import Check
from multimesh.launch.mmrun.hosts import Host, is_here, parse_hosts, read_hostfile
from multimesh.launch.mmrun.library import find_mpi
from multimesh.launch.mmrun.options import Options
from multimesh.launch.topology import cpu_quota, read_cores

__all__ = ["run_doctor"]

_JOB_SECONDS = 30
_QUERY_SECONDS = 3
_PROGRAM = """
import multimesh
from multimesh import _mpi
multimesh.init(cpus=2)
import jax
_mpi.communicator().Barrier()
assert len(jax.devices()) == 2
"""


@dataclass(frozen=True)
class _Job:
    """The job that the user wants to run, as far as it matters here."""

    options: Options
    environ: Mapping[str, str]
    interpreter: str
    hosts: tuple[Host, ...]

    @property
    def ranks_here(self) -> int:
        here = (host.places for host in self.hosts if is_here(host.name))
        return next(here, self.options.ranks or 2)


def run_doctor(options: Options, environ: Mapping[str, str]) -> int:
    """Checks this machine, and prints what was found and what to do about it.

    Args:
      options: What the user asked of mmrun; a program is only asked for its Python.
      environ: The environment for the ranks.

    Returns:
      0, or 1 if no job could run like this.
    """
    counts = dict.fromkeys(("ok", "warning", "error"), 0)
    for check in _examine(options, environ, counts):
        counts[check.verdict] += 1
        sys.stdout.write(_format(check))
        sys.stdout.flush()  # the next one may take seconds
    ok, warnings, errors = counts.values()
    sys.stdout.write(f"{ok} ok, {warnings} with warnings, {errors} with errors\n")
    return 1 if errors else 0


def _format(check):
    # Advice stands below what it is about, as an indented line or several.
    advice = "".join(f"{'':21}{line}\n" for line in check.advice.splitlines())
    return f"{check.verdict:8} {check.name:11} {check.found}\n{advice}"


def _examine(options, environ, counts) -> Iterator[Check]:
    """All checks; the last one depends on how many errors the others were counted as."""
    try:
        program = parse_program(options.program or (sys.executable, "-c", ""))
        job = _Job(options, environ, program.interpreter, _hosts(options))
    except StartupError as error:
        yield Check("arguments", "error", str(error))
        return
    python, required = probes.requirements()
    packages = list(required)
    with ThreadPoolExecutor() as pool:  # other hosts, and broken ones, answer late
        answers = {
            host.name: pool.submit(
                probes.ask_interpreter, job.interpreter, packages, host.name, options.rsh
            )
            for host in job.hosts
            if not is_here(host.name)
        }
        mine = probes.ask_interpreter(job.interpreter, packages)
        if isinstance(mine, str):
            yield Check("Python", "error", mine, "Give mmrun a program, or a Python, that works.")
            return
        yield checks.check_python(mine.version, python, mine.executable)
        yield checks.check_packages(mine.versions, required)
        yield from _examine_start(job)
        yield from _examine_host(job, mine)
        for name, answer in answers.items():
            yield checks.check_host(name, mine, answer.result(), probes.resolution_error(name))
    if not counts["error"]:  # else it would only fail as well, or wait for its time limit
        yield checks.check_job(_try_job(job))


def _examine_start(job):
    """How the ranks would be started."""
    try:
        mpi = find_mpi(job.interpreter)
    except StartupError as error:
        yield Check("MPI", "error", str(error))
        return
    yield Check("MPI", "ok", f"{mpi.name}, {mpi.mpiexec}")
    srun = shutil.which("srun")
    if srun:
        said = probes.run_limited(["scontrol", "show", "config"], _QUERY_SECONDS).output
        default = re.search(r"^MpiDefault\s*=\s*(\S+)", said, re.MULTILINE)
        yield checks.check_slurm(
            "SLURM_JOB_ID" in job.environ,
            mpi.kind,
            slurm.supported_pmis(srun),
            default[1] if default else "unknown",
        )
    ranks = job.options.ranks or (None if job.hosts else 2)
    try:
        launch = choose(replace(job.options, ranks=ranks), mpi, (), job.environ)
    except StartupError as error:
        yield Check("start", "error", str(error))
    else:
        yield Check("start", "ok", launch.reason)


def _examine_host(job, mine):
    """What this host has for its ranks."""
    ranks = job.ranks_here
    yield checks.check_loopback(probes.try_loopback())
    yield checks.check_proxies(job.environ)
    yield checks.check_shared_memory(*probes.shared_memory())
    yield checks.check_own_name(mine.host, mine.addresses, len(job.hosts) > 1)
    yield checks.check_cores(read_cores(probes.allowed_cores()), cpu_quota(), ranks)
    gpus = len(find_gpus(job.environ, count_gpus()).names)
    is_usable = jax_can_use_gpus(job.environ.get("JAX_PLATFORMS"))
    yield checks.check_gpus(gpus, is_usable, ranks, job.options.devices_per_rank or 1)


def _hosts(options) -> tuple[Host, ...]:
    """The hosts that the user named."""
    if options.hosts:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile else ()


def _try_job(job):
    """Runs a small program on two ranks, which are on two hosts if the user named several."""
    command = [sys.executable, "-m", "multimesh.launch.mmrun", "-n", "2"]
    if len(job.hosts) > 1:
        command += ["--hosts", ",".join(host.name for host in job.hosts[:2])]
    elif job.hosts:
        command += ["--hosts", f"{job.hosts[0].name}:2"]
    if job.options.rsh:
        command += ["--rsh", job.options.rsh]
    command += ["--backend", job.options.backend, job.interpreter, "-c", _PROGRAM]
    return probes.run_limited(command, _JOB_SECONDS, job.environ)
