"""mmrun where something that is usually there is not, or is already something else."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, clean_environment

MMRUN = [sys.executable, str(REPOSITORY / "scripts" / "mmrun")]
PID_MAX = int(Path("/proc/sys/kernel/pid_max").read_text())
READ = """
    import os, sys
    print(os.environ["OMPI_COMM_WORLD_RANK"], sys.argv[1:], repr(sys.stdin.read()))
    if "fail" in sys.argv:
        raise ValueError("mine")
"""


def test_mmrun_inside_a_rank_of_mmrun_starts_nothing(mmrun, write):
    ended = mmrun(2, *MMRUN, "-n", "2", write(READ), "a")
    assert ended.code == 0, ended.output
    assert ended.lines == {"[0] 0 ['a'] ''", "[1] 1 ['a'] ''"}
    assert ended.stderr.count("has already started the ranks") == 1


def test_a_program_inside_a_rank_of_mmrun_that_fails(mmrun, write):
    ended = mmrun(2, *MMRUN, write(READ), "fail")
    assert ended.code == 1
    assert ended.output.count("Traceback") == 1
    assert "failed with exit code 1" in ended.stderr.splitlines()[-1]


def test_a_command_inside_a_rank_of_mmrun(mmrun):
    ended = mmrun(2, *MMRUN, "sh", "-c", "echo hello")
    assert (ended.code, ended.lines) == (0, {"[0] hello", "[1] hello"})


def test_another_number_of_ranks_inside_a_rank(mmrun, write):
    ended = mmrun(2, *MMRUN, "-n", "3", write(READ))
    assert ended.code == 2
    assert "has already started 2 ranks" in ended.stderr


def run(tmp_path, write, environ, redirections="", **streams):
    line = " ".join([*MMRUN, "-n", "2", str(write(READ)), redirections])
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        ["sh", "-c", line], env=environ, cwd=tmp_path, text=True, timeout=60, check=False, **streams
    )


def test_ranks_do_not_wait_for_a_pipe(tmp_path, write):
    ended = run(tmp_path, write, clean_environment(), input="1\n2\n")
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 [] ''", "[1] 1 [] ''"]


@pytest.mark.parametrize("variable", ["HOME", "TMPDIR"])
def test_a_home_that_is_not_set_and_a_long_temporary_folder(tmp_path, write, variable):
    environ = clean_environment()
    environ.pop("HOME")
    if variable == "TMPDIR":
        environ["TMPDIR"] = str(tmp_path / ("x" * 120))
        os.mkdir(environ["TMPDIR"])
    ended = run(tmp_path, write, environ, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr


def test_files_of_jobs_that_were_killed(tmp_path, write):
    environ = clean_environment() | {"TMPDIR": str(tmp_path)}
    stale = [tmp_path / f"ompi.{(os.getpid() + offset) % PID_MAX}" for offset in range(1, 2000)]
    for folder in stale:
        folder.mkdir()
        (folder / f"pmix.{socket.gethostname()}.tool").touch()
    ended = run(tmp_path, write, environ, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    assert not list(tmp_path.glob("mmrun-*"))


def test_a_disk_that_is_full(tmp_path, write):
    with open("/dev/full", "w") as full:
        ended = run(tmp_path, write, clean_environment(), stdin=subprocess.DEVNULL, stdout=full)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("mmrun: the job was ended: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, write, closed):
    assert run(tmp_path, write, clean_environment(), closed).returncode == 0
