"""The command `mmrun`: the process outside, which starts a job, follows it and reports its end.

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

from multimesh.launch.mmrun.cli import main

__all__ = ["main"]
