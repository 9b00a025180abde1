"""Follows one job: starts mpiexec, hears from every rank, ends it when one of them fails.

mpiexec's own exit code and messages are not enough: hydra's code is 0 when a rank leaves through
`os._exit(0)`, and each MPI reports a signal in its own way. So the ranks' supervisors report to
mmrun, `verdict` makes sense of it, and mpiexec's messages are shown only while no rank has failed.
"""

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from multimesh.launch import wire
from multimesh.launch.mmrun import console as consoles
from multimesh.launch.mmrun.verdict import Verdict
from multimesh.launch.signals import signal_pipe

__all__ = ["Job"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUTS = {wire.Kind.OUTPUT: consoles.OUTPUT, wire.Kind.ERRORS: consoles.ERRORS}
# Ranks end when mmrun closes their connections, and mpiexec with them. If not, it is told so.
_TERMINATE_AFTER, _KILL_AFTER = 1.0, 5.0
# How long the rank that failed may take to send the rest of its output.
_LAST_WORDS = 1.0


class Job:
    """One job, from its start to its exit code."""

    def __init__(self, size: int, console: consoles.Console, endpoint: wire.Endpoint):
        """Prepares a job of `size` ranks, which find mmrun at the endpoint."""
        self._console = console
        self._endpoint = endpoint
        self._verdict = Verdict(size)
        self._selector = selectors.DefaultSelector()
        self._parsers: dict[socket.socket, wire.Parser] = {}
        self._ranks: dict[socket.socket, int] = {}  # the supervisors' connections
        self._failed_at: float | None = None
        self._stopped_at: float | None = None

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Starts the job and follows it to its end.

        Args:
          command: mpiexec and its arguments.
          environ: The environment for it.

        Returns:
          The exit code: 0, or that of the first rank that failed (128 + n after signal n).
        """
        self._listen()
        signals = signal_pipe((signal.SIGCHLD, *_STOP_SIGNALS))
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        mpiexec = subprocess.Popen(
            command,
            env={**environ, wire.ADDRESS_VARIABLE: self._endpoint.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for stream in filter(None, (mpiexec.stdout, mpiexec.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, self._read_mpiexec)
        try:
            self._follow(mpiexec)
        finally:
            mpiexec.terminate()  # does nothing where it has ended
            _wait_or_kill(mpiexec)
        self._verdict.close(mpiexec.returncode)
        return self._conclude()

    def _listen(self):
        self._listener = self._endpoint.listener
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _follow(self, mpiexec):
        while mpiexec.poll() is None:
            for key, _ in self._selector.select(self._patience()):
                # An earlier handler of this round may have closed it.
                if key.fd in self._selector.get_map():
                    key.data(key.fileobj)
            self._verdict.check_join()
            if self._verdict.failure:
                self._end(mpiexec, self._verdict.failure)
        self._drain()
        for key in list(self._selector.get_map().values()):
            if key.data == self._read_mpiexec:
                self._read_mpiexec(key.fileobj)

    def _patience(self) -> float | None:
        """Seconds until there is something to do without having heard anything."""
        if self._verdict.failure:
            return 0.05
        if self._verdict.join_deadline is not None:
            return max(0.0, self._verdict.join_deadline - time.monotonic())
        return None

    def _end(self, mpiexec, failure):
        """Ends a job that has failed, one step each time that it is called."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            # What the others have written until now is shown; not their echo of the failure.
            self._drain()
            self._console.only_rank = failure.rank
        is_talking = failure.rank in self._ranks.values()
        if self._stopped_at is None:
            if is_talking and now < self._failed_at + _LAST_WORDS:
                return
            self._stopped_at = now
            for connection in list(self._parsers):
                self._close(connection)
            self._selector.unregister(self._listener)
            self._listener.close()
        waited = now - self._stopped_at
        if waited > _KILL_AFTER:
            mpiexec.kill()
        elif waited > _TERMINATE_AFTER:
            mpiexec.terminate()

    def _drain(self):
        """Reads what has arrived, of connections that wait to be accepted too."""
        if self._listener.fileno() >= 0:
            self._accept(self._listener)
        for connection in list(self._parsers):
            while connection in self._parsers and self._read_rank(connection):
                pass

    # What can happen

    def _accept(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            wire.notice_loss(connection)
            self._parsers[connection] = wire.Parser(self._endpoint.secret)
            self._selector.register(connection, selectors.EVENT_READ, self._read_rank)

    def _read_rank(self, connection) -> bool:
        """Reads once; returns whether there may be more."""
        try:
            data = connection.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:  # reset, or the host is gone
            data = b""
        if not data:
            rank = self._ranks.get(connection)
            self._close(connection)
            if rank is not None:
                self._console.finish(rank)
                self._verdict.lose(rank)
            return False
        try:
            messages = self._parsers[connection].feed(data)
        except PermissionError:
            self._close(connection)
            return False
        for message in messages:
            self._handle(message, connection)
        return True

    def _handle(self, message, connection):
        if message.kind in _OUTPUTS:
            self._console.feed(message.rank, _OUTPUTS[message.kind], message.payload)
            return
        if message.kind is wire.Kind.HELLO:
            self._ranks[connection] = message.rank
        if message.kind is wire.Kind.EXIT:
            # What the program itself sent before its end counts first.
            self._read_others()
        self._verdict.hear(message)

    def _read_others(self):
        """Reads the short connections, which carry what ranks say of themselves."""
        self._accept(self._listener)
        for connection in list(self._parsers):
            if connection not in self._ranks:
                self._read_rank(connection)

    def _read_mpiexec(self, stream):
        try:
            data = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(stream)
        elif self._verdict.failure is None:
            self._console.pass_on(data)

    def _on_signals(self, read_end):
        for number in os.read(read_end, 64):
            if number in _STOP_SIGNALS:
                name = signal.Signals(number).name
                self._verdict.fail(None, f"stopped by {name}", 128 + number)

    def _close(self, connection):
        self._selector.unregister(connection)
        self._parsers.pop(connection)
        self._ranks.pop(connection, None)
        connection.close()

    def _conclude(self) -> int:
        failure = self._verdict.failure
        if failure is None:
            return 0
        if failure.traceback and failure.rank is not None:
            self._console.show(failure.rank, failure.traceback.encode())
        self._console.say(f"mmrun: {failure.reason}")
        return failure.exit_code


def _wait_or_kill(process):
    try:
        process.wait(_KILL_AFTER)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
