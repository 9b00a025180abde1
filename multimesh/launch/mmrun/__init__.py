"""The command `mmrun`: the process outside, which starts a job, follows it and reports its end.

    cli -> command      what to run in each rank
        -> library      which MPI mpi4py will load, and its mpiexec
        -> backends/    the command line and environment of that mpiexec
        -> watch        starts it, follows the ranks, decides the exit code
           -> verdict   what the ranks' messages make of the job
           -> console   writes every rank's output, whole lines, with its rank in front

It manages no processes: the MPI's own mpiexec, or srun, starts the ranks.
"""

from multimesh.launch.mmrun.cli import main

__all__ = ["main"]
