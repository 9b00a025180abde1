"""The command `mmrun [options] PROGRAM ARGS...`: from the command line to the exit code."""

import contextlib
import os
import shlex
import signal
import sys
import tempfile

from multimesh.config import read_config
from multimesh.errors import StartupError
from multimesh.launch import wire
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.mmrun.choice import Launch, choose
from multimesh.launch.mmrun.command import Program, parse_program
from multimesh.launch.mmrun.console import Console
from multimesh.launch.mmrun.hosts import addresses_for
from multimesh.launch.mmrun.library import find_mpi
from multimesh.launch.mmrun.options import Options, parse_options
from multimesh.launch.mmrun.watch import Job, has_input

__all__ = ["main"]

_USAGE_ERROR = 2
_OUTPUT_CLOSED = 128 + signal.SIGPIPE
# Options that ranks read as variables.
_VARIABLES = {
    "MULTIMESH_DEVICES_PER_RANK": "devices_per_rank",
    "MULTIMESH_STALL_TIMEOUT": "stall_timeout",
    "MULTIMESH_START_TIMEOUT": "start_timeout",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: The command line without the command's name; by default the process's own.

    Returns:
      The exit code: that of the first rank that failed, or 0.
    """
    _open_closed_streams()
    options = parse_options(arguments)
    if options.doctor:
        from multimesh.launch.mmrun.doctor import run_doctor  # no other command needs it

        return run_doctor(options, os.environ)
    try:
        program = parse_program(options.program)
        environ = _rank_environment(options)
        launcher = detect_launcher()
        if launcher is not None and launcher.size != 1:
            return _run_in_place(options, program, launcher, environ)
        rank_command = program.rank_command(bind=options.bind == "cores", has_input=has_input())
        launch = choose(options, find_mpi(program.interpreter), rank_command, environ)
        if options.dry_run:
            return _show(launch.reason, launch.command, launch.environ)
        return _launch(options, launch)
    except StartupError as error:
        _say(str(error))
        return _USAGE_ERROR


def _launch(options: Options, launch: Launch) -> int:
    environ = dict(launch.environ)
    with (
        contextlib.closing(Console.from_options(options, launch.ranks)) as console,
        tempfile.TemporaryDirectory(prefix="mmrun-", dir=_socket_folder()) as folder,
    ):
        addresses = addresses_for(launch.hosts)
        endpoint = (
            wire.listen_on_network(addresses)
            if addresses
            else wire.listen_here(os.path.join(folder, "socket"))
        )
        console.say(f"mmrun: {launch.reason}")
        stall_timeout = read_config(environ).stall_timeout
        job = Job(launch.ranks, console, endpoint, grace=options.grace, stall_timeout=stall_timeout)
        try:
            return job.run(launch.command, environ | console.rank_environment(environ))
        except BrokenPipeError:  # nobody reads the output any more, as after `| head`
            return _OUTPUT_CLOSED
        except OSError as error:  # the disk that the output goes to is full, for one
            _say(f"the job was ended: {error}")
            return 1


def _run_in_place(options: Options, program: Program, launcher: Launcher, environ) -> int:
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


def _open_closed_streams():
    """Gives each standard stream that is closed a place: a socket must not get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _socket_folder() -> str | None:
    """Where the socket goes: a path of more than 107 bytes cannot be one. None: the default."""
    return None if len(os.fsencode(tempfile.gettempdir())) < 80 else "/tmp"


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
