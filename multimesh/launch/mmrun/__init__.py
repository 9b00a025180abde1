"""The command `mmrun`: the process outside, which starts a job, follows it and reports its end.

    probe               asks this interpreter which MPI it loads, before anything else
    cli -> options      the command line as data
        -> command      what to run in each rank
        -> library      which MPI mpi4py will load, and its mpiexec
        -> choice       what starts the ranks, from the hosts (hosts) and the SLURM job (slurm)
           -> backends/ the command line and environment of mpiexec or srun
        -> start        makes what a job needs: its console, and a socket for the ranks
        -> watch        starts it, follows the ranks, decides the exit code
           -> verdict   what the ranks' messages make of the job
           -> console   shows every rank's output, whole lines, with its rank in front
              -> rows   what of it is final, and what a progress bar may still change (chatter)
              -> screen the terminal, with the bars at its bottom
              -> logs   one file per rank
        -> doctor/      checks the machine, in place of a job

It manages no processes: the MPI's own mpiexec, or srun, starts the ranks.
"""

import os
import sys

from multimesh.launch.mmrun.probe import Probe

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: The command line without the command's name; by default the process's own.

    Returns:
      The exit code: that of the first rank that failed, or 0.
    """
    _open_closed_streams()
    probe = Probe(sys.executable)
    # Imported while it thinks.
    from multimesh.launch.mmrun.cli import run

    return run(arguments, probe)


def _open_closed_streams():
    """Gives each standard stream that is closed a place: a socket must not get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
