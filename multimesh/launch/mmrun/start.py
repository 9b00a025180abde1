"""Runs the job that was chosen: makes its console and its socket, and has `watch` follow it."""

import contextlib
import os
import tempfile

from multimesh.config import read_config
from multimesh.launch import wire
from multimesh.launch.mmrun.backends import openmpi
from multimesh.launch.mmrun.choice import Launch
from multimesh.launch.mmrun.console import Console
from multimesh.launch.mmrun.hosts import addresses_for
from multimesh.launch.mmrun.options import Options
from multimesh.launch.mmrun.watch import Job

__all__ = ["start"]


def start(options: Options, launch: Launch) -> int:
    """Starts a job.

    Args:
      options: What the user asked for.
      launch: How the job is started.

    Returns:
      The exit code: that of the first rank that failed, or 0.

    Raises:
      StartupError: What was asked for cannot be had here.
      OSError: What the ranks write has nowhere to go: nobody reads it, or the disk is full.
    """
    environ = dict(launch.environ)
    with (
        contextlib.closing(Console.from_options(options, launch.ranks)) as console,
        tempfile.TemporaryDirectory(
            prefix="mmrun-", dir=_socket_folder(), ignore_cleanup_errors=True
        ) as folder,
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
        environ |= console.rank_environment(environ) | openmpi.session_folder(environ, folder)
        return job.run(launch.command, environ)


def _socket_folder() -> str:
    """Where the socket goes: a path of more than 107 bytes cannot be one."""
    folder = os.path.abspath(tempfile.gettempdir())  # TMPDIR may be a relative path
    return folder if len(os.fsencode(folder)) < 80 else "/tmp"
