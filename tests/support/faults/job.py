"""Runs the job of one cell, and records how it ended and what it left behind."""

import os
import signal
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from support.faults.cells import Cell
from support.faults.launchers import command
from support.faults.timing import (
    CLEANUP_SECONDS,
    START_TIMEOUT,
    promised_seconds,
    stall_timeout,
)
from support.jobs import COMPILE_QUICKLY, clean_environment
from support.processes import with_variable

__all__ = ["Ended", "run_cell"]

PROGRAM = Path(__file__).parent / "program" / "train.py"
# Not measured, but ended all the same: a job whose fault does not strike, or does not end it.
_STRIKE_LIMIT = 120
_MARGIN = 10

# By this, a job's processes are known, whatever started them.
_TAG = "TESTS_FAULT_JOB"


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
      code: The exit code of the launcher, or None if it had to be killed.
      stdout: What it wrote.
      stderr: What it wrote.
      seconds: From the fault to the end, or None if the fault never struck.
      wall: From the start to the end.
      left: The processes that were there when the time for cleaning up was over.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float | None
    wall: float
    left: tuple[str, ...]

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_cell(cell: Cell) -> Ended:
    """Runs one cell's job to its end, and ends it if it does not end by itself."""
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        struck = Path(folder) / "struck"
        started = time.time()
        with _open(folder, "stdout") as stdout, _open(folder, "stderr") as stderr:
            process = subprocess.Popen(
                _command(cell, struck),
                cwd=folder,
                env=_environment(cell, tag, folder),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
            try:
                code = _wait(process, struck, promised_seconds(cell) + _MARGIN)
                ended = time.time()
                left = _wait_for_cleanup(tag) if code is not None else ()
            finally:
                _kill(process, tag)
            return Ended(
                code,
                _read(stdout),
                _read(stderr),
                seconds=ended - struck.stat().st_mtime if struck.exists() else None,
                wall=ended - started,
                left=left,
            )


def _command(cell, struck):
    options = {
        "ranks": cell.place.ranks,
        "kind": cell.kind.name,
        "rank": cell.place.rank,
        "moment": cell.moment,
        "struck": struck,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return command(cell.launcher, cell.place.ranks, [str(PROGRAM), *words])


def _environment(cell, tag, folder):
    settings = {
        _TAG: tag,
        "MULTIMESH_STALL_TIMEOUT": str(stall_timeout(cell)),
        "MULTIMESH_START_TIMEOUT": str(START_TIMEOUT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_TRACEBACK_FILTERING": "off",  # it adds a line after the exception
        # What mmrun would set for Open MPI in a container; without effect elsewhere.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PMIX_MCA_psec": "native",
    }
    if not cell.launcher.is_mmrun:
        # What a killed mpirun leaves behind keeps a later one with its process id from starting.
        settings["PRTE_MCA_prte_local_tmpdir_base"] = folder
    return clean_environment() | COMPILE_QUICKLY | settings


def _wait(process, struck, limit):
    """The exit code, or None if the job has not ended so long after the fault."""
    started = time.time()
    while True:
        try:
            return process.wait(0.05)
        except subprocess.TimeoutExpired:
            now = time.time()
        if struck.exists():
            if now - struck.stat().st_mtime > limit:
                return None
        elif now - started > _STRIKE_LIMIT:
            return None


def _wait_for_cleanup(tag) -> tuple[str, ...]:
    """The processes that are left when their time is over."""
    deadline = time.time() + CLEANUP_SECONDS
    while processes := with_variable(_TAG, tag):
        if time.time() > deadline:
            return tuple(f"{pid}: {command}" for pid, command in processes.items())
        time.sleep(0.1)
    return ()


def _kill(process, tag):
    """Ends the launcher, which then may end the rest; and what is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in with_variable(_TAG, tag):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _open(folder, name):
    return open(Path(folder) / name, "w+b")


def _read(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
