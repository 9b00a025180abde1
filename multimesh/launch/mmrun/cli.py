"""The command `mmrun [options] PROGRAM ARGS...`: from the command line to the exit code."""

import contextlib
import os
import shlex
import signal
import sys

from multimesh.errors import StartupError
from multimesh.launch import wire
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.mmrun.command import Program, has_input, parse_program
from multimesh.launch.mmrun.library import Question
from multimesh.launch.mmrun.options import Options, parse_options
from multimesh.launch.mmrun.probe import Probe

__all__ = ["run"]

_USAGE_ERROR = 2
_OUTPUT_CLOSED = 128 + signal.SIGPIPE
# Options that ranks read as variables.
_VARIABLES = {
    "MULTIMESH_DEVICES_PER_RANK": "devices_per_rank",
    "MULTIMESH_STALL_TIMEOUT": "stall_timeout",
    "MULTIMESH_START_TIMEOUT": "start_timeout",
}


def run(arguments: list[str] | None, probe: Probe) -> int:
    """Runs the command.

    Args:
      arguments: The command line without the command's name; by default the process's own.
      probe: This interpreter, asked which MPI it loads.

    Returns:
      The exit code: that of the first rank that failed, or 0.
    """
    try:
        return _run(arguments, probe)
    finally:
        probe.drop()  # if nobody has read its answer


def _run(arguments: list[str] | None, probe: Probe) -> int:
    options = parse_options(arguments)
    if options.doctor:
        from multimesh.launch.mmrun.doctor import run_doctor  # no other command needs it

        return run_doctor(options, os.environ)
    try:
        program = parse_program(options.program)
        environ = _rank_environment(options)
        launcher = detect_launcher()
        if launcher is not None and launcher.size != 1:
            return _run_in_place(options, program, launcher, environ, probe)
        return _launch(options, program, environ, probe)
    except StartupError as error:
        _say(str(error))
        return _USAGE_ERROR


def _launch(options: Options, program: Program, environ: dict[str, str], probe: Probe) -> int:
    question = Question(program.interpreter, probe)
    # Imported while that interpreter thinks: these take as long, and everyone waits for a start.
    from multimesh.launch.mmrun.choice import choose
    from multimesh.launch.mmrun.start import start

    rank_command = program.rank_command(bind=options.bind == "cores", has_input=has_input())
    launch = choose(options, question.answer(), rank_command, environ)
    if options.dry_run:
        return _show(launch.reason, launch.command, launch.environ)
    try:
        return start(options, launch)
    except BrokenPipeError:  # nobody reads the output any more, as after `| head`
        return _OUTPUT_CLOSED
    except OSError as error:  # the disk that the output goes to is full, for one
        _say(f"the job was ended: {error}")
        return 1


def _run_in_place(
    options: Options, program: Program, launcher: Launcher, environ, probe: Probe
) -> int:
    """Becomes the program: another launcher has already started the ranks."""
    if options.ranks and launcher.size and options.ranks != launcher.size:
        raise StartupError(
            f"{launcher.name} has already started {launcher.size} ranks, and mmrun, inside one of "
            f"them, was asked for {options.ranks}. Give one of the two the number of ranks."
        )
    reason = f"rank {launcher.rank} of {launcher.name} runs the program; nothing more is started"
    command = program.in_place_command()
    if options.dry_run:
        return _show(reason, command, environ)
    if launcher.rank == 0:
        _say(f"{launcher.name} has already started the ranks: each runs the program in its place")
    if not program.is_python:
        # An mmrun around this rank has seen Python start; the end of it, it will not see.
        wire.notify(wire.Kind.FINISHED)
    probe.drop()
    os.execvpe(command[0], command, environ)


def _rank_environment(options: Options) -> dict[str, str]:
    """This process's environment, with the options that are for the ranks."""
    environ = dict(os.environ)
    for variable, option in _VARIABLES.items():
        if getattr(options, option) is not None:
            environ[variable] = f"{getattr(options, option):g}"
    if options.stacks:
        environ["MULTIMESH_STACKS"] = "1"
    return environ


def _show(reason, command, environ) -> int:
    """What a dry run prints: the choice, what it changes in the environment, the command."""
    print(f"# {reason}")
    for name in sorted(os.environ.keys() - environ.keys()):
        print(f"unset {name}")
    for name, value in sorted(environ.items()):
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")
    print(shlex.join(command))
    return 0


def _say(text):
    with contextlib.suppress(OSError):  # there may be no place left to say it
        print(f"mmrun: {text}", file=sys.stderr, flush=True)
