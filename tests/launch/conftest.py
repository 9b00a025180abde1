"""Starts real jobs from a process that has no MPI, each with a time limit."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from multimesh.launch.mmrun.backends import openmpi
from multimesh.launch.mmrun.library import find_mpi

REPOSITORY = Path(__file__).resolve().parents[2]
# By these a launcher tells a process its rank; an outer job's must not leak in.
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "MULTIMESH_")
TIME_LIMIT = 90


@dataclass(frozen=True)
class Ended:
    """How a job ended. `at` is the wall-clock time."""

    code: int
    stdout: str
    stderr: str
    at: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def lines(self) -> set[str]:
        return set(self.stdout.splitlines())


def clean_environment(**variables) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), environ.get("PYTHONPATH"))))
    return environ | {"PYTHONPATH": path, **variables}


def run_command(command, cwd, **variables) -> Ended:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    return Ended(result.returncode, result.stdout, result.stderr, time.time())


@pytest.fixture
def write(tmp_path):
    """Writes a script and returns its path."""

    def write(source, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def mmrun(tmp_path):
    """Runs `mmrun -n RANKS WORDS...` from a checkout; its line on what it chose is taken off."""

    def mmrun(ranks, *words, **variables):
        command = [sys.executable, REPOSITORY / "scripts" / "mmrun", "-n", ranks, *words]
        ended = run_command(command, tmp_path, **variables)
        choice = re.match(r"mmrun: \d+ ranks? by mpiexec of .* on this host \(.*\)\n", ended.stderr)
        return replace(ended, stderr=ended.stderr[choice.end() :]) if choice else ended

    return mmrun


@pytest.fixture
def mmrun_on_terminal(tmp_path):
    """Runs `mmrun -n RANKS WORDS...` on a terminal of 60 columns and returns what it is sent."""

    def mmrun_on_terminal(ranks, *words, **variables):
        controller, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        process = subprocess.Popen(
            [sys.executable, REPOSITORY / "scripts" / "mmrun", "-n", str(ranks), *words],
            cwd=tmp_path,
            env=clean_environment(TERM="xterm", **variables),
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        sent = b""
        with contextlib.suppress(OSError):  # at its end: nobody has the terminal open
            while data := os.read(controller, 65536):
                sent += data
        os.close(controller)
        assert process.wait(TIME_LIMIT) == 0, sent
        return sent

    return mmrun_on_terminal


@pytest.fixture
def start_mmrun(tmp_path):
    """Starts `mmrun -n RANKS WORDS...` and returns the process."""

    def start_mmrun(ranks, *words):
        return subprocess.Popen(
            [sys.executable, REPOSITORY / "scripts" / "mmrun", "-n", str(ranks), *words],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_mmrun


@pytest.fixture
def mpirun(tmp_path):
    """Runs `mpirun -n RANKS python WORDS...`, without anything of mmrun in it."""

    def mpirun(ranks, *words, **variables):
        mpi = find_mpi(sys.executable)
        if mpi.kind != "openmpi":
            pytest.skip(f"these tests start Open MPI, and mpi4py loads {mpi.version}")
        command = openmpi.command(mpi.mpiexec, ranks, [sys.executable, *words])
        return run_command(command, tmp_path, **openmpi.environment({}), **variables)

    return mpirun


@pytest.fixture
def python(tmp_path):
    """Runs `python WORDS...`."""

    def python(*words, **variables):
        return run_command([sys.executable, *words], tmp_path, **variables)

    return python
