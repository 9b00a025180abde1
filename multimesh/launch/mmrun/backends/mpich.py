"""Starts ranks with MPICH's mpiexec (hydra)."""

from collections.abc import Mapping, Sequence

from multimesh.launch.mmrun.hosts import Host

__all__ = ["command", "environment"]


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
      mpiexec: Path of hydra's mpiexec.
      ranks: Number of ranks.
      rank_command: The command line of one rank.
      hosts: The hosts and their numbers of ranks; none for this host alone.
      rsh: What reaches other hosts, or None for ssh.
      environ: Unused: hydra passes the whole environment to other hosts by itself.
    """
    # Said explicitly, since inside a SLURM job hydra would start through srun.
    settings = ["-launcher", "ssh" if hosts else "fork"]
    if hosts:
        if rsh:
            settings += ["-launcher-exec", rsh]
        settings += ["-hosts", ",".join(map(str, hosts))]
    return [mpiexec, *settings, "-n", str(ranks), *rank_command]


def environment(environ: Mapping[str, str], *, has_fabric: bool = False) -> dict[str, str]:
    """The environment for mpiexec: hydra needs no settings of ours.

    Args:
      environ: The environment of mmrun.
      has_fabric: Unused: MPICH finds out by itself, and quickly.

    Returns:
      A copy of it.
    """
    return dict(environ)
