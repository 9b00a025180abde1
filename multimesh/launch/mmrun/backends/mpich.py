"""Starts ranks with MPICH's mpiexec (hydra)."""

from collections.abc import Mapping, Sequence

__all__ = ["command", "environment"]


def command(mpiexec: str, ranks: int, rank_command: Sequence[str]) -> list[str]:
    """The command line that starts `ranks` times `rank_command` on this host."""
    # `fork` and not what hydra would detect: inside a SLURM job it would start through srun.
    return [mpiexec, "-launcher", "fork", "-n", str(ranks), *rank_command]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for mpiexec: hydra needs no settings of ours.

    Args:
      environ: The environment of mmrun.

    Returns:
      A copy of it.
    """
    return dict(environ)
