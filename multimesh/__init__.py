"""multimesh: pipeline-parallel (MPMD) training for JAX and Flax over MPI.

How a step flows through the package, in the order in which the parts import one another:

    errors, config, _compat, _mpi  what everything else stands on
    launch                         how ranks come to be: mmrun, and init() inside a rank
    stages                         registry -> trace -> placement -> partition -> program
    schedule                       in which order: a table of (task, microbatch), tried before use
    transport                      how a value moves from one submesh to another
    plan                           tasks x schedule x transfers, the same on every rank
    lowering                       a rank's instructions: run, post, send, take
    executor                       runs them
    fingerprint                    compares the plans of all ranks
    dump                           writes plans and programs to a folder
    trees                          how pytrees differ, for errors
    batch, state, results          what enters and leaves a step
    checkpoint                     the state on disk
    source                         what a step computes: traced, cut and planned
    step, steps                    a compiled, callable step; one for each shape of batch
    initial                        the first state, each leaf made where it lives
    jax                            the public API: multimesh.jax, multimesh.jax.flax
    pytest_plugin                  tests that run on several ranks: @pytest.mark.mpi(ranks=2)

A module imports only from those named before its own; stages, schedule and transport import
nothing of one another (tests/test_layers.py). Importing this module imports no JAX, so that
`init` can still choose the devices.

PYTEST_DONT_REWRITE: pytest would warn that mmrun has imported this module before it could.
"""

TYPE_CHECKING = False  # type checkers know better
if TYPE_CHECKING:
    from multimesh.launch import init, preempted

__all__ = ["__version__", "init", "preempted"]

__version__ = "0.1.0"


def __getattr__(name: str):
    # When it is used: mmrun, which is in this package too, shall not wait for what ranks need.
    if name in ("init", "preempted"):
        from multimesh import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
