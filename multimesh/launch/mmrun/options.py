"""mmrun's command line: `mmrun [options] PROGRAM ARGS...`, parsed by argparse into data."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from multimesh.config import LONGEST

__all__ = ["Options", "parse_options"]


@dataclass(frozen=True)
class Options:
    """What the user asked of mmrun.

    Attributes:
      program: PROGRAM and its arguments; empty only with `doctor`.
      ranks: Number of ranks, or None to take it from the hosts or the SLURM allocation.
      hosts: `n1:2,n2:2`, or None.
      hostfile: A file with a host in each line, or None.
      rsh: The command that reaches another host, or None for ssh.
      backend: "auto", "mpirun" or "srun".
      devices_per_rank: CPU devices of each rank, or None for what the program asks of `init`.
      bind: "cores": each rank has its own share of the cores; "none": all share all.
      stall_timeout: Seconds a rank waits for another before the job ends, or None for the
        environment's, or the default.
      start_timeout: Seconds within which every rank must have called `init`, or None likewise.
      stacks: Whether the report of a hang shows the Python stacks of every rank.
      grace: Seconds that ranks have to save after a preemption notice.
      only_rank: The one rank whose output is shown, or None for all.
      log_dir: A folder for one file of output per rank, or None.
      prefix: Whether lines have their rank in front.
      dry_run: Only show what would be run.
      doctor: Only check the machine.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    rsh: str | None = None
    backend: str = "auto"
    devices_per_rank: int | None = None
    bind: str = "cores"
    stall_timeout: float | None = None
    start_timeout: float | None = None
    stacks: bool = False
    grace: float = 30.0
    only_rank: int | None = None
    log_dir: str | None = None
    prefix: bool = True
    dry_run: bool = False
    doctor: bool = False


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parses a command line; on a mistake it says so and ends the process with code 2.

    Args:
      arguments: The command line without the command's name; by default the process's own.

    Returns:
      The options.
    """
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    options = Options(**values | {"program": tuple(values["program"])})
    if not options.program and not options.doctor:
        parser.error("expected a program to run, such as `mmrun -n 2 python train.py`")
    if options.hosts is not None and options.hostfile is not None:
        parser.error("expected --hosts or --hostfile, not both")
    if options.backend == "srun" and (options.hosts, options.hostfile) != (None, None):
        parser.error("expected --hosts or --backend srun, not both: srun has the job's hosts")
    return options


def _parser():
    parser = argparse.ArgumentParser(
        prog="mmrun",
        usage="mmrun [-n N] [options] PROGRAM [ARGS...]",
        description="Run a program on several ranks: of this host, of several, of a SLURM job.",
        allow_abbrev=False,
    )
    _add_placement(parser.add_argument_group("where"))
    _add_limits(parser.add_argument_group("how long"))
    _add_output(parser.add_argument_group("what is shown"))
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGS...", help="a Python file, or any"
    )
    return parser


def _add_placement(group):
    group.add_argument(
        "-n",
        dest="ranks",
        type=_count,
        metavar="N",
        help="number of ranks; default: as many as the hosts or the SLURM job have places",
    )
    group.add_argument(
        "--hosts", metavar="n1:2,n2:2", help="the hosts, and how many ranks each has"
    )
    group.add_argument(
        "--hostfile", metavar="FILE", help="a host in each line: `n1:2` or `n1 slots=2`"
    )
    group.add_argument("--rsh", metavar="COMMAND", help="what reaches other hosts (default: ssh)")
    group.add_argument(
        "--backend",
        choices=("auto", "mpirun", "srun"),
        default="auto",
        help="what starts the ranks (default: srun inside a SLURM job that can, else mpirun)",
    )
    group.add_argument(
        "--devices-per-rank",
        type=_count,
        metavar="K",
        help="CPU devices of each rank, in place of what the program asks of init",
    )
    group.add_argument(
        "--bind",
        choices=("cores", "none"),
        default="cores",
        help="give each rank its own share of the cores (default), or leave all to all",
    )


def _add_limits(group):
    group.add_argument(
        "--stall-timeout",
        type=_seconds,
        metavar="S",
        help="seconds a rank waits for another before the job ends with a report (default: 120)",
    )
    group.add_argument(
        "--stacks", action="store_true", help="show every rank's Python stacks in that report"
    )
    group.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="seconds within which every rank must have called init (default: 60)",
    )
    group.add_argument(
        "--grace",
        type=_seconds,
        default=Options.grace,
        metavar="S",
        help="seconds that ranks have to save after SIGTERM or SIGUSR1 (default: 30)",
    )


def _add_output(group):
    group.add_argument("--only-rank", type=_rank, metavar="R", help="show the output of one rank")
    group.add_argument("--log-dir", metavar="DIR", help="also write each rank's output to a file")
    group.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="no rank in front of lines"
    )
    group.add_argument(
        "--dry-run", action="store_true", help="show the command and environment, and run nothing"
    )
    group.add_argument(
        "--doctor", action="store_true", help="check this machine, and say what to do about it"
    )


def _count(text):
    return _number(text, int, lambda number: number >= 1, "a whole number, 1 or more")


def _rank(text):
    return _number(text, int, lambda number: number >= 0, "a rank, 0 or more")


def _seconds(text):
    expected = f"a positive number of seconds, at most {LONGEST}"
    return _number(text, float, lambda number: 0 < number <= LONGEST, expected)


def _number(text, kind, is_valid, expected):
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not is_valid(number):
        raise argparse.ArgumentTypeError(f"must be {expected}. Got {text!r}.")
    return number
