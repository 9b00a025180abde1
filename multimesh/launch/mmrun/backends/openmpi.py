"""Starts ranks with Open MPI's mpiexec."""

import re
from collections.abc import Mapping, Sequence

from multimesh.launch import wire
from multimesh.launch.mmrun.hosts import Host

__all__ = ["command", "environment", "session_folder"]

# Variables that describe the host or session they were set on, and would be wrong on another.
_HOST_VARIABLES = re.compile(
    r"(HOSTNAME|HOST|DISPLAY|PWD|OLDPWD|SHLVL|_|TERM|TTY|XAUTHORITY)$"
    r"|(SSH|SLURM|XDG|DBUS|PMIX|PMI|PRTE|OMPI)_"
)
_SETTINGS = re.compile(r"(OMPI|PMIX|PRTE)_MCA_|(OMPI|PRTE)_ALLOW_")


def command(
    mpiexec: str,
    ranks: int,
    rank_command: Sequence[str],
    hosts: Sequence[Host] = (),
    rsh: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line that starts `ranks` times `rank_command`.

    Args:
      mpiexec: Path of Open MPI's mpiexec.
      ranks: Number of ranks.
      rank_command: The command line of one rank.
      hosts: The hosts and their numbers of ranks; none for this host alone.
      rsh: What reaches other hosts, or None for ssh.
      environ: The environment that ranks on other hosts get; this host's ranks inherit it.
    """
    # Without OVERSUBSCRIBE more ranks than cores are refused. The ranks bind themselves.
    settings = ["--map-by", "slot:OVERSUBSCRIBE" if hosts else ":OVERSUBSCRIBE"]
    settings += ["--bind-to", "none"]
    if hosts:
        settings += ["--host", ",".join(map(str, hosts))]
        if rsh:
            settings += ["--prtemca", "plm_ssh_agent", rsh]
        for name in (wire.ADDRESS_VARIABLE, *sorted(environ or ())):
            if _is_forwarded(name):
                settings += ["-x", name]
    return [mpiexec, "-n", str(ranks), *settings, *rank_command]


def environment(environ: Mapping[str, str], *, has_fabric: bool = False) -> dict[str, str]:
    """The environment for mpiexec; what the user has set stays.

    Args:
      environ: The environment of mmrun.
      has_fabric: Whether this host has a fast network (InfiniBand and the like).

    Returns:
      A copy of it with settings for Open MPI.
    """
    defaults = {
        # Containers run as root, where mpirun asks twice whether that is meant.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # A rank that waits must not hold the core that another one needs: with more ranks than
        # cores a barrier takes microseconds instead of tens of milliseconds.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if not has_fabric:
        # Looking for one takes a second of every start.
        defaults["OMPI_MCA_btl"] = "^ofi"
    return defaults | dict(environ)


def session_folder(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Where mpiexec keeps its files on this host while a job runs.

    By default that is a folder with the number of its process. If one of that number was killed
    before, its files are still there, and Open MPI 5 does not start ("The PMIx server's listener
    thread failed to start").

    Args:
      environ: The environment of the job; what the user has set there stays.
      folder: A folder of this job alone.

    Returns:
      What to add to the environment of mpiexec.
    """
    is_set = any(re.fullmatch(r"PRTE_MCA_prte_(local_)?tmpdir_base", name) for name in environ)
    return {} if is_set else {"PRTE_MCA_prte_local_tmpdir_base": folder}


def _is_forwarded(name):
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return False  # an exported shell function
    return bool(_SETTINGS.match(name)) or not _HOST_VARIABLES.match(name)
