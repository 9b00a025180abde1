"""One MPI job that runs marked tests of one file, seen from the pytest that started it.

The two talk through a folder: the job's order lies there, and each rank adds a line to a file of
its own for everything that happens. What a rank has written stays readable however it ends.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from multimesh.pytest_plugin import measure, reports
from multimesh.pytest_plugin.needs import Needs

__all__ = ["Job", "Order", "RankLog", "read_order"]

# Not a setting: it tells a rank's pytest where its order lies.
_VARIABLE = "MULTIMESH_PYTEST_JOB"
# By these a launcher tells a process its rank. A job of ours is its own, and on this host.
_LAUNCHER_PREFIXES = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_ORDER_FILE = "order.json"
_POLL_SECONDS = 0.02
# After the time limit: ranks write their stacks, mmrun ends the job, and if it cannot, we do.
_STACKS_SECONDS, _INTERRUPT_SECONDS = 1.0, (0.5, 5.0)
_LONGEST_OUTPUT = 20_000  # characters of a job's output that are shown


@dataclass(frozen=True)
class Order:
    """What a job is to do.

    Attributes:
      folder: Where it reports.
      path: The test file.
      tests: Node ids of the tests to run, in order.
      deadline: When it must have ended, as `time.time`.
      coverage: How to measure the ranks, as `measure.settings` says it; None for not at all.
    """

    folder: str
    path: str
    tests: tuple[str, ...]
    deadline: float
    coverage: dict | None

    @property
    def file(self) -> str:
        """Where it lies. The pytest that gave it holds a lock on the file while it lives."""
        return os.path.join(self.folder, _ORDER_FILE)

    def is_abandoned(self) -> bool:
        """Whether the pytest that gave it is gone."""
        try:
            with open(self.file) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True
        return True

    def report_file(self, rank: int) -> str:
        """Where a rank adds a line for each event."""
        return os.path.join(self.folder, f"rank-{rank}.jsonl")

    def stacks_file(self, rank: int) -> str:
        """Where a rank writes its stacks when the time is over."""
        return os.path.join(self.folder, f"rank-{rank}.stacks")

    def coverage_file(self, rank: int) -> str:
        """Where a rank saves its coverage."""
        return os.path.join(self.folder, f"rank-{rank}.coverage")


def read_order() -> Order | None:
    """The order of this process if it is a rank of a job of ours. Nothing it starts is one."""
    folder = os.environ.pop(_VARIABLE, None)
    if folder is None:
        return None
    values = json.loads(Path(folder, _ORDER_FILE).read_text())
    return Order(**values | {"tests": tuple(values["tests"])})


@dataclass
class RankLog:
    """What one rank has reported so far.

    Attributes:
      path: Its file.
      place: The rank's name, with its host once that is known.
      started: Node ids of the tests it has started.
      ended: Node ids of the tests it is done with.
      missing: Ordered node ids that it did not find.
      events: Everything that concerns a test: node id -> lines of reports.
      imports: How files failed that it could not import.
      exits: The reason and the code of each `pytest.exit`.
    """

    path: str
    place: str
    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    events: dict[str, list[str]] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    exits: list[tuple[str, int | None]] = field(default_factory=list)
    _position: int = 0

    def read(self):
        """Reads what is new, up to the last whole line."""
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        for line in whole.splitlines():
            self._hear(**json.loads(line))

    def _hear(self, kind, value, report="", code=None):
        match kind:
            case "host":
                self.place += f" on {value}"
            case "start":
                self.started.add(value)
            case "report":
                self.events.setdefault(value, []).append(report)
            case "end":
                self.ended.add(value)
            case "missing":
                self.missing.add(value)
            case "import":
                self.imports.append(value)
            case "exit":
                self.exits.append((value, code))


class Job:
    """A running job."""

    def __init__(self, config, needs: Needs, path: Path, tests: Sequence[str]):
        """Starts it.

        Args:
          config: The configuration of this pytest; the job's gets the same command line.
          needs: Ranks, time limit and environment.
          path: The test file.
          tests: Node ids of the tests to run, in order.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="multimesh-pytest-")
        folder = self._folder.name
        self.tests = tests
        self.size = needs.ranks
        self.timeout = needs.timeout
        self.expired = False
        self._deadline = time.monotonic() + needs.timeout
        self._order = Order(
            folder, str(path), tuple(tests), time.time() + needs.timeout, measure.settings()
        )
        self._lock = open(self._order.file, "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(json.dumps(asdict(self._order)))
        self._lock.flush()
        self.logs = [
            RankLog(self._order.report_file(rank), f"rank {rank} of {self.size}")
            for rank in range(self.size)
        ]
        # Without capturing, the job's output is shown as it comes.
        self._shown: int | None = 0 if config.option.capture == "no" else None
        with open(self._output_file, "wb") as output:
            self._process = subprocess.Popen(
                _command(config, needs.ranks),
                cwd=config.invocation_params.dir,
                env=_environment(os.environ) | dict(needs.env) | {_VARIABLE: folder},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, test: str) -> bool:
        """Waits until every rank is done with a test; for the last one, until the job has ended.

        Returns:
          Whether they all are. If not, the job is over.
        """
        while True:
            is_over = self._process.poll() is not None
            self._read()
            is_done = all(test in log.ended | log.missing for log in self.logs)
            if is_over or (is_done and test != self.tests[-1]):
                return is_done
            if time.monotonic() > self._deadline + _STACKS_SECONDS:
                self.expired = True
                self.stop()
            time.sleep(_POLL_SECONDS)

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than it should."""
        return self._process.poll() not in (None, 0)

    @property
    def has_started_a_test(self) -> bool:
        """Whether it came so far."""
        return any(log.started for log in self.logs)

    def reports_of(self, config, test: str) -> list[dict]:
        """For each rank, the test's reports: phase ("setup", "call", "teardown") -> report."""
        lines = [log.events.get(test, ()) for log in self.logs]
        parsed = [[reports.from_json(config, line) for line in of_rank] for of_rank in lines]
        return [{report.when: report for report in of_rank} for of_rank in parsed]

    def ending(self) -> str:
        """How a job that is over ended."""
        if self.expired:
            return f"The job did not end within {self.timeout:g} s."
        said = [line for line in self.output().splitlines() if line.startswith("mmrun: ")]
        return said[-1] if said else f"The job ended with exit code {self._process.poll()}."

    def output(self) -> str:
        """The end of what the job wrote to its standard output and standard error."""
        text = Path(self._output_file).read_text(errors="replace")
        return text[-_LONGEST_OUTPUT:]

    def stacks(self) -> list[tuple[str, str]]:
        """What each rank did when the time was over: (the rank's name, stacks)."""
        found = []
        for rank, log in enumerate(self.logs):
            path = Path(self._order.stacks_file(rank))
            text = path.read_text(errors="replace") if path.exists() else ""
            found.append((log.place, _own_frames(text) or "(it wrote none)"))
        return found

    def stop(self):
        """Ends the job if it still runs."""
        for seconds in _INTERRUPT_SECONDS:  # the second one tells mmrun to leave nobody time
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                _wait(self._process, seconds)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self):
        """Ends the job and removes its folder."""
        self.stop()
        measure.collect(self._order.coverage_file(rank) for rank in range(self.size))
        self._lock.close()
        self._folder.cleanup()

    @property
    def _output_file(self):
        return os.path.join(self._folder.name, "output")

    def _read(self):
        for log in self.logs:
            log.read()
        if self._shown is not None:
            with open(self._output_file, "rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()


def _own_frames(stacks: str) -> str:
    """What faulthandler wrote, without the watchdog's thread, and without what called the test."""
    threads = [text for text in stacks.split("\n\n") if "pytest_plugin/watchdog.py" not in text]
    return "\n\n".join(re.split(r"^  File .*/_pytest/", text, flags=re.M)[0] for text in threads)


def _wait(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _command(config, ranks) -> list[str]:
    """Calls mmrun with this pytest's own command line, so that every option counts there too."""
    mmrun = [sys.executable, "-m", "multimesh.launch.mmrun", "-n", str(ranks)]
    words = [str(word) for word in config.invocation_params.args]
    # pytest-cov would start over with the data file. `measure` does its part in the ranks.
    without = ["--no-cov"] if config.pluginmanager.has_plugin("pytest_cov") else []
    return [*mmrun, sys.executable, "-m", "pytest", *words, *without]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for mmrun: without an outer job, and with this package importable."""
    clean = {k: v for k, v in environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    package = str(Path(__file__).resolve().parents[2])
    if package not in sysconfig.get_paths().values():
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, (clean.get("PYTHONPATH"), package)))
    return clean
