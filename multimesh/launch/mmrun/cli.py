"""The command `mmrun -n N PROGRAM ARGS...`: starts a program on N ranks of this host.

mmrun manages no processes: the MPI's own mpiexec starts the ranks. mmrun chooses that mpiexec,
sets it up, shows the ranks' output, and reports how the job ended.
"""

import argparse
import os
import signal
import sys
import tempfile

from multimesh.errors import StartupError
from multimesh.launch import wire
from multimesh.launch.mmrun.backends import mpich, openmpi
from multimesh.launch.mmrun.command import parse_program
from multimesh.launch.mmrun.console import Console
from multimesh.launch.mmrun.library import find_mpi
from multimesh.launch.mmrun.watch import Job

__all__ = ["main"]

_BACKENDS = {"openmpi": openmpi, "mpich": mpich}
_USAGE_ERROR = 2
_OUTPUT_CLOSED = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: The command line without the command's name; by default the process's own.

    Returns:
      The exit code: that of the first rank that failed, or 0.
    """
    options = _parser().parse_args(arguments)
    try:
        program = parse_program(options.program)
        mpi = find_mpi(program.interpreter)
    except StartupError as error:
        print(f"mmrun: {error}", file=sys.stderr)
        return _USAGE_ERROR
    backend = _BACKENDS[mpi.kind]
    rank_command = program.rank_command(bind=options.bind == "cores")
    environ = backend.environment(os.environ)
    if options.devices_per_rank:
        environ["MULTIMESH_DEVICES_PER_RANK"] = str(options.devices_per_rank)
    with tempfile.TemporaryDirectory(prefix="mmrun-") as folder:
        job = Job(
            options.ranks,
            Console.on_standard_output(),
            wire.listen_here(os.path.join(folder, "socket")),
        )
        try:
            return job.run(backend.command(mpi.mpiexec, options.ranks, rank_command), environ)
        except BrokenPipeError:  # nobody reads the output any more, as after `| head`
            return _OUTPUT_CLOSED


def _parser():
    parser = argparse.ArgumentParser(
        prog="mmrun",
        usage="mmrun -n N [options] PROGRAM [ARGS...]",
        description="Run a program on several ranks of this host.",
    )
    parser.add_argument(
        "-n", dest="ranks", type=_positive, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--devices-per-rank",
        type=_positive,
        metavar="K",
        help="CPU devices of each rank, in place of what the program asks of init",
    )
    parser.add_argument(
        "--bind",
        choices=("cores", "none"),
        default="cores",
        help="give each rank its own share of the cores (default), or leave all to all",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        action=_Program,
        metavar="PROGRAM ARGS...",
        help="a Python file, or any command",
    )
    return parser


class _Program(argparse.Action):
    """Requires a program, which argparse.REMAINDER does not."""

    def __call__(self, parser, namespace, values, option_string=None):
        if not values:
            parser.error("expected a program to run, such as `mmrun -n 2 python train.py`")
        namespace.program = values


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Got {text}.")
    return number
