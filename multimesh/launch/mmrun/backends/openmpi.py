"""Starts ranks with Open MPI's mpiexec."""

from collections.abc import Mapping, Sequence

__all__ = ["command", "environment"]


def command(mpiexec: str, ranks: int, rank_command: Sequence[str]) -> list[str]:
    """The command line that starts `ranks` times `rank_command` on this host."""
    # Without OVERSUBSCRIBE more ranks than cores are refused. The ranks bind themselves.
    settings = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [mpiexec, "-n", str(ranks), *settings, *rank_command]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for mpiexec; what the user has set stays.

    Args:
      environ: The environment of mmrun.

    Returns:
      A copy of it with Open MPI's settings for ranks on one host.
    """
    defaults = {
        # Containers run as root, where mpirun asks twice whether that is meant.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Looking for a fabric that is not there takes a second of every start.
        "OMPI_MCA_btl": "^ofi",
        # A rank that waits must not hold the core that another one needs: with more ranks than
        # cores a barrier takes microseconds instead of tens of milliseconds.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return defaults | dict(environ)
