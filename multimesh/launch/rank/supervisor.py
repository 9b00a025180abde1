"""What mmrun starts in each rank: a supervisor, and under it the user's program.

    python -P -m multimesh.launch.rank [OPTIONS] -- PROGRAM ARGS...

The program runs in a forked child. The supervisor passes the child's output on to mmrun and, when
the child is gone, says how it ended. It is a process of its own so that it can do that whatever
happens to the program: after `os._exit`, a segmentation fault or a kill, everything that the
program and its own children had written is still read to the last byte.

The child ends with its supervisor, and the supervisor with mmrun; a rank that failed takes along
whatever it has started. So a job leaves nothing behind.
"""

import argparse
import contextlib
import io
import os
import selectors
import signal
import socket
import sys
import time

from multimesh.launch import wire
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.processes import adopt_orphans, die_with_parent, kill_descendants
from multimesh.launch.rank.binding import bind_to_cores
from multimesh.launch.rank.program import run_program
from multimesh.launch.signals import signal_pipe

__all__ = ["main"]

# A grandchild may hold the output open after the program is gone: what it writes is shown as long
# as it goes on writing, but not for ever, and not for long when the job has failed.
_SILENCE_SECONDS, _DRAIN_SECONDS, _DRAIN_SECONDS_AFTER_FAILURE = 0.3, 5.0, 1.0
# What SLURM or a person sends to say that the rank has to end soon.
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_FORWARDED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def main():
    """The entry point of a rank."""
    options = _parse_arguments()
    launcher = detect_launcher()
    if launcher is None:
        sys.exit("multimesh.launch.rank is for mmrun: no launcher has started this process.")
    alone = launcher.size == 1
    if options.in_place:
        run_program(options.program, safe_path=options.safe_path, alone=alone)
        return
    if options.bind and launcher.local_rank is not None and launcher.local_size:
        bind_to_cores(launcher.local_rank, launcher.local_size)
    outputs = {wire.Kind.OUTPUT: os.pipe(), wire.Kind.ERRORS: os.pipe()}
    adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become_program(outputs, parent, has_input=not options.no_input)
        if options.exec:
            os.execvp(options.program[0], options.program)
        run_program(options.program, safe_path=options.safe_path, alone=alone)
        return
    with contextlib.suppress(OSError):  # both do it, so that neither has to wait for the other
        os.setpgid(child, child)
    for _, write_end in outputs.values():
        os.close(write_end)
    readers = {read_end: kind for kind, (read_end, _) in outputs.items()}
    with wire.connect() as connection:
        supervisor = Supervisor(launcher, child, readers, connection)
        code = supervisor.run(is_python=not options.exec)
    # Nothing of this process is worth an orderly end, and the exit code is the message.
    os._exit(code)


def _parse_arguments():
    parser = argparse.ArgumentParser(prog="multimesh.launch.rank")
    parser.add_argument("--bind", action="store_true", help="pin this rank to its cores")
    parser.add_argument("--no-input", action="store_true", help="let it read nothing")
    parser.add_argument("--safe-path", action="store_true", help="leave sys.path alone")
    parser.add_argument("--in-place", action="store_true", help="run it here, unsupervised")
    parser.add_argument("--exec", action="store_true", help="the program is not Python")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    own = sys.argv[1 : sys.argv.index("--")]
    options = parser.parse_args(own)
    options.program = sys.argv[len(own) + 2 :]
    return options


def _become_program(outputs, parent, *, has_input):
    """Makes this forked child the program: its own group, its output into the pipes."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    if not has_input:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for (read_end, write_end), fd in zip(outputs.values(), (1, 2), strict=True):
        os.dup2(write_end, fd)
        os.close(read_end)
        os.close(write_end)
    # A pipe is block-buffered, and a line should be seen when it is printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


class Supervisor:
    """Watches one program from its start to its end."""

    def __init__(
        self,
        launcher: Launcher,
        child: int,
        readers: dict[int, wire.Kind],
        connection: socket.socket,
    ):
        self._rank = launcher.rank
        self._child = child
        self._readers = readers
        self._connection = connection
        self._parser = wire.Parser()
        self._signals = signal_pipe((signal.SIGCHLD, *_NOTICES, *_FORWARDED))
        self._selector = selectors.DefaultSelector()
        self._was_noticed = False
        self._is_gone = False
        self._code = 0  # the child's exit code, or 128 + n after signal n
        self._signal = 0

    def run(self, *, is_python: bool) -> int:
        """Passes on output and signals until the program is gone.

        Args:
          is_python: Whether the program is run by `program`, which reports what it sees.

        Returns:
          The exit code for this process: the program's, or 128 + n after signal n.
        """
        for source in (*self._readers, self._signals, self._connection.fileno()):
            self._selector.register(source, selectors.EVENT_READ)
        try:
            self._send(wire.Kind.HELLO, {"host": socket.gethostname(), "is_python": is_python})
            self._follow_children()  # the program may have ended before its signal could be seen
            while not self._is_gone:
                self._pump(None)
            # Said before the rest of the output is read: other ranks notice the loss too, and
            # this is the one to be reported.
            self._send(wire.Kind.EXIT, {"code": self._code, "signal": self._signal})
            self._drain(_DRAIN_SECONDS_AFTER_FAILURE if self._code else _DRAIN_SECONDS)
            self._connection.shutdown(socket.SHUT_WR)
            while self._code:
                # mpiexec would end the job on such a code; whether and when is for mmrun to say.
                self._pump(None)
        except OSError:  # mmrun is gone or has closed the connection: the job is over
            self._code = self._code or 1
        if self._code:
            kill_descendants()
        return self._code

    def _drain(self, limit):
        end = time.monotonic() + limit
        while self._readers and time.monotonic() < end and self._pump(_SILENCE_SECONDS):
            pass

    def _pump(self, timeout) -> bool:
        """Handles what happens next; returns whether anything did within the time."""
        events = self._selector.select(timeout)
        for key, _ in events:
            self._handle(key.fd)
        return bool(events)

    def _handle(self, source):
        if source == self._connection.fileno():
            self._hear(self._connection.recv(4096))
        elif source == self._signals:
            for number in os.read(self._signals, 64):
                self._on_signal(number)
        elif data := os.read(source, 65536):
            self._send(self._readers[source], data)
        else:
            self._selector.unregister(source)
            del self._readers[source]

    def _hear(self, data):
        if not data:
            raise ConnectionError("mmrun closed the connection")
        for message in self._parser.feed(data):
            if message.kind is wire.Kind.PREEMPT:
                self._give_notice()
            elif message.kind is wire.Kind.INTERRUPT:
                # To its group, as Ctrl-C would come to all that it has started.
                self._signal_program(os.killpg, signal.SIGINT)

    def _on_signal(self, number):
        if number == signal.SIGCHLD:
            self._follow_children()
        elif number in _NOTICES:
            self._send(wire.Kind.NOTICE, {"signal": number})
            self._give_notice()
        else:
            self._signal_program(os.kill, number)

    def _give_notice(self):
        """Tells the program once that it has to end soon, from wherever that is known."""
        if not self._was_noticed:
            self._was_noticed = True
            self._signal_program(os.kill, signal.SIGTERM)

    def _signal_program(self, kill, number):
        if not self._is_gone:
            with contextlib.suppress(ProcessLookupError):
                kill(self._child, number)

    def _follow_children(self):
        """Notes what has become of the program, and buries the orphans that it has left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
                pid, status = os.waitpid(-1, options)
                if not pid:
                    return
                if pid == self._child:
                    self._note(status)

    def _note(self, status):
        if os.WIFSTOPPED(status):
            self._send(wire.Kind.STOPPED, {"signal": os.WSTOPSIG(status)})
        elif os.WIFCONTINUED(status):
            self._send(wire.Kind.STOPPED, {"signal": 0})
        else:
            self._is_gone = True
            self._signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._code = 128 + self._signal if self._signal else os.WEXITSTATUS(status)

    def _send(self, kind, payload):
        wire.send(self._connection, kind, self._rank, payload)
