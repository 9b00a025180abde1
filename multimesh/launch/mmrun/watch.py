"""Follows one job: starts mpiexec, hears from every rank, ends it when one of them fails.

mpiexec's own exit code and messages are not enough: hydra's code is 0 when a rank leaves through
`os._exit(0)`, and each MPI reports a signal in its own way. So the ranks' supervisors report to
mmrun, `verdict` makes sense of it, and mpiexec's messages are shown only while no rank has failed.

Signals go the other way. mpiexec is kept out of it, since each MPI would do something else with
them: mmrun tells the supervisors, and they the ranks. It ends with mmrun, also after a SIGKILL;
the ranks then lose their connections, and end too.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from multimesh.launch import wire
from multimesh.launch.mmrun import console as consoles
from multimesh.launch.mmrun.command import has_input
from multimesh.launch.mmrun.verdict import Failure, Request, Verdict
from multimesh.launch.processes import die_with_parent, kill_tagged
from multimesh.launch.signals import signal_pipe

__all__ = ["Job"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OUTPUTS = {wire.Kind.OUTPUT: consoles.OUTPUT, wire.Kind.ERRORS: consoles.ERRORS}
# Ranks end when mmrun closes their connections, and mpiexec with them. If not, it is told so.
_TERMINATE_AFTER, _KILL_AFTER = 1.0, 5.0
# How long the rank that failed may take to send the rest of its output.
_LAST_WORDS = 1.0


class Job:
    """One job, from its start to its exit code."""

    def __init__(
        self,
        size: int,
        console: consoles.Console,
        endpoint: wire.Endpoint,
        *,
        grace: float = 30.0,
        stall_timeout: float = 120.0,
    ):
        """Prepares a job.

        Args:
          size: Number of ranks.
          console: Shows their output.
          endpoint: Where they find mmrun.
          grace: Seconds that ranks have to end once they were asked to.
          stall_timeout: Seconds that a rank's process may be stopped.
        """
        self._console = console
        self._endpoint = endpoint
        self._verdict = Verdict(size, grace, stall_timeout)
        self._selector = selectors.DefaultSelector()
        self._parsers: dict[socket.socket, wire.Parser] = {}
        self._ranks: dict[socket.socket, int] = {}  # the supervisors' connections
        self._held: list[socket.socket] = []  # those of ranks that have ended before others may
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
        # One that this process was told to ignore, as nohup does, stays ignored.
        wanted = [each for each in _STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        signals = signal_pipe((signal.SIGCHLD, *wanted))
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        mpiexec = self._start(command, environ)
        try:
            self._follow(mpiexec)
        finally:
            mpiexec.terminate()  # does nothing where it has ended
            _wait_or_kill(mpiexec)
        self._verdict.close(mpiexec.returncode)
        if self._verdict.failure is not None:
            # Supervisors see to this, unless mpiexec has killed one of them first.
            kill_tagged(wire.ADDRESS_VARIABLE, self._endpoint.address)
        return self._conclude()

    def _listen(self):
        self._listener = self._endpoint.listener
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _start(self, command, environ):
        mmrun = os.getpid()
        # Outside the terminal's foreground group it does not get Ctrl-C, nor may it read there.
        relays_input = has_input()
        mpiexec = subprocess.Popen(
            command,
            env={**environ, wire.ADDRESS_VARIABLE: self._endpoint.address},
            stdin=subprocess.PIPE if relays_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: die_with_parent(mmrun),
        )
        for stream in filter(None, (mpiexec.stdout, mpiexec.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, self._read_mpiexec)
        if relays_input:
            relay = self._relay_to(mpiexec.stdin)
            self._selector.register(sys.stdin, selectors.EVENT_READ, relay)
        return mpiexec

    def _relay_to(self, stream):
        """Returns what passes on a line that was typed on the terminal."""

        def relay(terminal):
            try:
                data = os.read(terminal.fileno(), 65536) if _may_read(terminal) else b""
                stream.write(data)
                stream.flush()
            except OSError:
                data = b""  # the terminal is gone, or mpiexec does not listen
            if not data:
                self._selector.unregister(terminal)
                stream.close()

        return relay

    def _follow(self, mpiexec):
        while mpiexec.poll() is None and not self._have_all_answered():
            for key, _ in self._selector.select(self._patience()):
                # An earlier handler of this round may have closed it.
                if key.fd in self._selector.get_map():
                    key.data(key.fileobj)
            self._verdict.check_limits()
            if self._verdict.failure:
                self._end(mpiexec, self._verdict.failure)
        self._drain()
        self._release()
        for key in list(self._selector.get_map().values()):
            if key.data == self._read_mpiexec:
                self._read_mpiexec(key.fileobj)

    def _have_all_answered(self) -> bool:
        """Whether a job that was asked to end has done so, and only mpiexec is left."""
        verdict = self._verdict
        return verdict.request is not None and verdict.are_all_gone() and not self._ranks

    def _patience(self) -> float | None:
        """Seconds until there is something to do without having heard anything."""
        return 0.05 if self._verdict.failure else self._verdict.patience()

    def _end(self, mpiexec, failure: Failure):
        """Ends a job that has failed, one step each time that it is called."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            # What the others have written until now is shown; not their echo of the failure.
            self._drain()
            self._console.hear_only(failure.rank)
        is_talking = failure.rank in self._ranks.values() and not self._verdict.stopped(
            failure.rank
        )
        if self._stopped_at is None:
            if is_talking and now < self._failed_at + _LAST_WORDS:
                return
            self._stopped_at = now
            for connection in list(self._parsers):
                self._close(connection)
            self._release()
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
            if rank is not None:
                self._verdict.lose(rank)
                if not self._verdict.failure:
                    # Its supervisor's end would make mpiexec end the others, which have time: to
                    # end as they were asked to, or to be the reason for this one's end.
                    self._held.append(connection.dup())
            self._close(connection)
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
            self._pass_on_request([connection])
        if message.kind is wire.Kind.EXIT:
            # What the program itself sent before its end counts first.
            self._read_others()
        self._verdict.hear(message)
        if message.kind is wire.Kind.NOTICE:
            self._pass_on_request(list(self._ranks))
        elif message.kind is wire.Kind.STOPPED:
            name, place = self._verdict.stopped(message.rank), self._verdict.place(message.rank)
            self._console.say(f"mmrun: {place} {f'is stopped by {name}' if name else 'goes on'}")

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
        elif self._verdict.failure is None and self._verdict.request is None:
            self._console.pass_on(data)

    def _on_signals(self, read_end):
        for number in os.read(read_end, 64):
            if number in _STOP_SIGNALS:
                self._on_stop_signal(Request.by(number))

    def _on_stop_signal(self, request):
        verdict = self._verdict
        if not self._ranks or (verdict.request and request.kind is wire.Kind.INTERRUPT):
            # Nobody is there to do it in an orderly way, or nobody may take any longer.
            verdict.fail(None, f"stopped by {request.signal}", request.exit_code)
        elif verdict.request is None:
            verdict.ask(request)
            if request.kind is wire.Kind.INTERRUPT:
                self._console.say("mmrun: interrupting all ranks; again to kill them")
            self._pass_on_request(list(self._ranks))

    def _pass_on_request(self, connections):
        if self._verdict.request is None:
            return
        for connection in connections:
            try:
                wire.send(connection, self._verdict.request.kind, self._ranks[connection])
            except OSError:  # it is about to be found closed
                continue

    def _release(self):
        while self._held:
            self._held.pop().close()

    def _close(self, connection):
        self._selector.unregister(connection)
        self._parsers.pop(connection)
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            self._console.finish(rank)
        connection.close()

    def _conclude(self) -> int:
        failure = self._verdict.failure
        if failure is None:
            return 0
        if failure.traceback and failure.rank is not None:
            self._console.show(failure.rank, failure.traceback.encode(errors="backslashreplace"))
        self._console.say(f"mmrun: {failure.reason}")
        return failure.exit_code


def _may_read(terminal) -> bool:
    """Whether reading the terminal will not stop this process: it is not in the background."""
    try:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # it is not this process's terminal, and does not control it
        return True


def _wait_or_kill(process):
    try:
        process.wait(_KILL_AFTER)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
