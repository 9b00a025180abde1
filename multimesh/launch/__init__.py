"""How ranks come to be: `mmrun` outside, `init` inside.

    mmrun  -> command      what to run in each rank
           -> library      which MPI mpi4py will load, and its mpiexec
           -> backends/    the command line and environment of that mpiexec
           -> watch        starts it, follows the ranks, decides the exit code
              -> console   writes every rank's output, whole lines, with its rank in front

    rank   -> supervises one rank: passes its output on, reports how it ended
           -> program      runs the user's Python program as plain `python` would

    startup -> environment whether a launcher started several ranks
            -> coordinator brings up jax.distributed over them
            -> failure     an uncaught exception on one rank ends the job
            -> ending      a rank that is done waits for the others

    signals                a signal as something that select can wait for
    wire                   the messages from the ranks to mmrun

A rank also works without mmrun: under bare `mpirun` only the `startup` part exists. Nothing here
imports JAX or MPI before `init` is called.
"""

from multimesh.launch.startup import init, require_init

__all__ = ["init", "require_init"]
