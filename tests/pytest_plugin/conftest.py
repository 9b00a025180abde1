"""Runs pytest on small files of tests, in a process of its own. They use mpi4py only: that is fast.

The process is started without pytest's `pytester`, which would load this project's own settings.
"""

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
from support import jobs

from multimesh.launch.mmrun.backends import openmpi
from multimesh.launch.mmrun.library import find_mpi

PLUGIN = ("-p", "multimesh.pytest_plugin")
TIME_LIMIT = 120
HEADER = """\
import os, signal, sys, time
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
two_ranks = pytest.mark.mpi(ranks=2)
"""


@dataclass(frozen=True)
class Ended:
    """How a pytest ended."""

    code: int
    output: str

    @property
    def counts(self) -> dict[str, int]:
        """From the last line: {"passed": 2, "failed": 1}."""
        summary = re.findall(r"^=+ (.*) in [\d.]+s", self.output, re.MULTILINE)[-1]
        return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", summary)}

    def failure(self, test) -> str:
        """What is shown of a test that failed."""
        return re.search(rf"^_+ (?:.* )?{test} _+\n(.*?)^[_=]{{3}}", self.output, re.M | re.S)[1]


@pytest.fixture
def write(tmp_path):
    """Writes `test_it.py`."""

    def write(source):
        (tmp_path / "test_it.py").write_text(HEADER + textwrap.dedent(source))

    return write


@pytest.fixture
def run(tmp_path):
    """Runs a command in the folder of `test_it.py`."""

    def run(*command, **variables):
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=jobs.clean_environment() | {"COLUMNS": "80"} | variables,
            timeout=TIME_LIMIT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Ended(ended.returncode, re.sub("\x1b\\[[0-9;]*[mK]", "", ended.stdout))

    return run


@pytest.fixture
def run_pytest(run):
    """Runs `pytest WORDS...` outside any job."""

    def run_pytest(*words, **variables):
        return run(sys.executable, "-m", "pytest", *PLUGIN, *words, **variables)

    return run_pytest


@pytest.fixture
def run_in_place(run):
    """Runs `mpirun -n RANKS pytest`."""

    def run_in_place(ranks, *words):
        mpi = find_mpi(sys.executable)
        if mpi.kind != "openmpi":
            pytest.skip(f"starts Open MPI, and mpi4py loads {mpi.version}")
        program = [sys.executable, "-m", "pytest", *PLUGIN, *words]
        return run(*openmpi.command(mpi.mpiexec, ranks, program), **openmpi.environment({}))

    return run_in_place
