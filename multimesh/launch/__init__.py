"""How ranks come to be: `mmrun` outside, `init` inside.

    mmrun/                 the command outside: starts a job, follows it, reports its end
    rank/                  what mmrun starts in each rank, around the user's program
    wire                   the messages between the two

    startup                init: inside the user's program
      -> request           what the program asks for
      -> environment       whether a launcher started several ranks
      -> failure           an uncaught exception on one rank ends the job
      -> joining           starts JAX alone, or on all ranks together
           -> devices      CPU devices in equal parts, or the GPUs of the host (gpus)
           -> places       which ranks share a host, and how hosts reach each other
           -> coordinator  brings up jax.distributed over the ranks
           -> stall        reports a hang and ends it: what does every rank do, does it move?
                           (activity, frames, movement; notices carries questions and answers,
                           hang concludes)
           -> ending       a rank that is done waits for the others
    preemption             preempted: whether the job was told to end soon

    signals                a signal as something that select can wait for

A rank also works without mmrun: under bare `mpirun` only the `startup` part exists. Nothing here
imports JAX or MPI before `init` is called.
"""

TYPE_CHECKING = False  # type checkers know better
if TYPE_CHECKING:
    from multimesh.launch.preemption import preempted
    from multimesh.launch.startup import init, require_init

__all__ = ["init", "preempted", "require_init"]


def __getattr__(name: str):
    # When it is used, as in the package above.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multimesh.launch import preemption, startup

    return getattr(preemption if name == "preempted" else startup, name)
