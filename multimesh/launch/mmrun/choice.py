"""Chooses what starts the ranks: this host's mpiexec, mpiexec over several hosts, or srun.

The first that applies:

1. `--hosts` or `--hostfile`: mpiexec, which reaches the other hosts by ssh.
2. Inside a SLURM job, with an srun that speaks the MPI's PMI: srun. It starts ranks on all nodes,
   accounts for them, and ends them with the job.
3. Inside a SLURM job without such an srun: mpiexec, on the job's nodes.
4. mpiexec on this host.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh.errors import StartupError
from multimesh.launch.mmrun import slurm
from multimesh.launch.mmrun.backends import mpich, openmpi, srun
from multimesh.launch.mmrun.hosts import fill, is_here, parse_hosts, read_hostfile
from multimesh.launch.mmrun.library import MPI
from multimesh.launch.mmrun.options import Options
from multimesh.launch.mmrun.probe import with_home

__all__ = ["Launch", "choose"]

_FABRICS = "/sys/class/infiniband"
# By these a launcher tells a process its rank. Settings of the user's start alike and stay.
_RANK_VARIABLES = re.compile(r"(PMIX|PMI|OMPI|PRTE)_(?!MCA_|ALLOW_)|MPI_LOCAL")


@dataclass(frozen=True)
class Launch:
    """How a job is started.

    Attributes:
      command: The command line.
      environ: Its environment.
      ranks: Number of ranks.
      hosts: The names of the hosts that ranks run on; none if all run on this one.
      reason: What was chosen and why, for the user.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    ranks: int
    hosts: tuple[str, ...]
    reason: str


def choose(
    options: Options, mpi: MPI, rank_command: Sequence[str], environ: Mapping[str, str]
) -> Launch:
    """Chooses how to start a job.

    Args:
      options: What the user asked for.
      mpi: The MPI that the ranks load.
      rank_command: The command line of one rank.
      environ: The environment for the ranks.

    Returns:
      The command line and environment that start it.

    Raises:
      StartupError: What was asked for cannot be had here.
    """
    environ = {k: v for k, v in with_home(environ).items() if not _RANK_VARIABLES.match(k)}
    start = _Start(options, mpi, tuple(rank_command), environ)
    if options.hosts is not None:
        return start.on_hosts(parse_hosts(options.hosts), "--hosts was given")
    if options.hostfile is not None:
        return start.on_hosts(read_hostfile(options.hostfile), "--hostfile was given")
    allocation = slurm.read_allocation(environ)
    if allocation is not None:
        return _inside_slurm(start, allocation)
    if options.backend == "srun":
        raise StartupError("--backend srun needs a SLURM job: start mmrun by sbatch or salloc.")
    if options.ranks is None:
        raise StartupError("Expected the number of ranks: -n N, --hosts, or a SLURM job.")
    return start.mpiexec(options.ranks, (), "no SLURM job, no --hosts")


def _inside_slurm(start, allocation):
    options = start.options
    ranks = options.ranks or allocation.tasks
    job = f"inside SLURM job {allocation.job}"
    path = shutil.which("srun")
    obstacle = _obstacle(start, path)
    if obstacle is None:
        return start.srun(path, ranks, allocation, job)
    if options.backend == "srun":
        raise StartupError(
            f"--backend srun cannot start this job: {obstacle}. Leave the choice to mmrun, or "
            "install an MPI that this srun can start (`srun --mpi=list` shows the PMI types)."
        )
    # More ranks than tasks: how they share the nodes is then left to mpiexec.
    hosts = fill(allocation.nodes, ranks) if ranks <= allocation.tasks else allocation.nodes
    return start.mpiexec(ranks, hosts, f"{job}, but {obstacle}")


def _obstacle(start, path):
    """Why srun cannot start the ranks, or None."""
    if start.options.backend == "mpirun":
        return "--backend mpirun was given"
    if path is None:
        return "there is no srun on PATH"
    pmi = srun.PMI[start.mpi.kind]
    if pmi not in slurm.supported_pmis(path):
        return f"this srun has no --mpi={pmi}, which {start.mpi.name} needs"
    return None


@dataclass(frozen=True)
class _Start:
    """What all ways to start have in common."""

    options: Options
    mpi: MPI
    rank_command: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def backend(self):
        """What knows how this MPI is started."""
        return {"openmpi": openmpi, "mpich": mpich}[self.mpi.kind]

    def on_hosts(self, hosts, why):
        """By mpiexec, on as many of some hosts as the ranks need."""
        hosts = fill(hosts, self.options.ranks)
        return self.mpiexec(sum(host.places for host in hosts), hosts, why)

    def mpiexec(self, ranks, hosts, why):
        """By mpiexec, on some hosts, or on this one if there are none."""
        here = all(is_here(host.name) for host in hosts) and len(hosts) <= 1
        remote = () if here else hosts
        environ = self.backend.environment(self.environ, has_fabric=_has_fabric())
        command = self.backend.command(
            self.mpi.mpiexec, ranks, self.rank_command, remote, self.options.rsh, environ
        )
        where = ", ".join(map(str, remote)) or "this host"
        reason = f"{_count(ranks)} by mpiexec of {self.mpi.name} on {where} ({why})"
        return Launch(tuple(command), environ, ranks, _names(remote), reason)

    def srun(self, path, ranks, allocation, why):
        """By srun, on the nodes of the job."""
        pmi, nodes = srun.PMI[self.mpi.kind], allocation.nodes
        command = srun.command(
            path,
            ranks,
            self.rank_command,
            pmi=pmi,
            nodes=len(nodes),
            cpus=allocation.cpus,
            can_bind=slurm.can_bind_tasks(),
        )
        # A batch job with one node has mmrun and the ranks on it; salloc's shell is elsewhere.
        hosts = () if len(nodes) == 1 and is_here(nodes[0].name) else nodes
        reason = f"{_count(ranks)} by srun --mpi={pmi} for {self.mpi.name} ({why})"
        # A log-in node tells nothing of the nodes' fabric.
        has_fabric = _has_fabric() or not any(is_here(node.name) for node in nodes)
        environ = self.backend.environment(self.environ, has_fabric=has_fabric)
        environ = srun.environment(environ, is_bundled=self.mpi.is_bundled)
        return Launch(tuple(command), environ, ranks, _names(hosts), reason)


def _names(hosts):
    return tuple(host.name for host in hosts)


def _count(ranks):
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _has_fabric():
    return os.path.isdir(_FABRICS) and bool(os.listdir(_FABRICS))
