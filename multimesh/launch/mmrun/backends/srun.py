"""Starts ranks with SLURM's srun, which does it over all nodes of a job."""

from collections.abc import Mapping, Sequence

__all__ = ["PMI", "command", "environment"]

# What the MPI's library speaks. With another one, srun starts N processes that are each alone.
PMI = {"openmpi": "pmix", "mpich": "pmi2"}


def command(
    srun: str,
    ranks: int,
    rank_command: Sequence[str],
    *,
    pmi: str,
    nodes: int,
    cpus: int,
    can_bind: bool,
) -> list[str]:
    """The command line that starts `ranks` times `rank_command` on the job's nodes.

    Args:
      srun: Path of srun.
      ranks: Number of ranks.
      rank_command: The command line of one rank.
      pmi: How the ranks find each other: a value of `PMI`.
      nodes: Number of nodes of the job.
      cpus: Number of CPUs of the job.
      can_bind: Whether this cluster binds tasks to CPUs; where not, srun complains of the option.
    """
    settings = [
        f"--mpi={pmi}",
        f"--nodes={min(nodes, ranks)}",
        # Without it a rank that is killed leaves the others waiting.
        "--kill-on-bad-exit=1",
        # An interactive shell is a job step too, and would keep its CPUs from this one.
        "--overlap",
        # sbatch --export=NONE would reach here and hide what mmrun tells its ranks.
        "--export=ALL",
        # As under mpiexec, the first rank reads what is typed.
        "--input=0",
    ]
    if can_bind:
        # The ranks divide the cores of their node among themselves.
        settings.append("--cpu-bind=none")
    if ranks > cpus:
        settings.append("--overcommit")
    return [srun, "-n", str(ranks), *settings, *rank_command]


def environment(environ: Mapping[str, str], *, is_bundled: bool) -> dict[str, str]:
    """The environment for srun; what the user has set stays.

    Args:
      environ: The environment of mmrun.
      is_bundled: Whether the MPI was installed by pip, in the ranks' Python environment.

    Returns:
      A copy of it with settings for PMIx.
    """
    # Such an MPI has no plug-in for munge, and would say so at length.
    return ({"PMIX_MCA_psec": "native"} if is_bundled else {}) | dict(environ)
