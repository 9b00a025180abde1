"""`mmrun --doctor`: what each check says of facts, and the whole of it on this machine."""

import sys
import time
from dataclasses import replace

import pytest

from multimesh.launch.mmrun.doctor import checks, probes
from multimesh.launch.mmrun.doctor.probes import Ended, Interpreter
from multimesh.launch.topology import Core

CORES = [Core(number // 2, 0, number, number) for number in range(4)]
HERE = Interpreter("3.11.7", "/env/bin/python", {"jax": "0.10.2"}, "/src/m.py", "n1", ["10.0.0.1"])
BOTH = frozenset({"pmi2", "pmix"})

GOOD = [
    checks.check_python("3.11.0", ">=3.11", "python"),
    checks.check_python("3.13.0rc1", ">=3.11,<4", "python"),
    checks.check_packages({"jax": "0.10.0"}, {"jax": ">=0.9.2"}),
    checks.check_packages({"jax": "0.10.0.dev1+cuda"}, {"jax": ">=0.10"}),
    checks.check_slurm(False, "openmpi", BOTH, "none"),
    checks.check_slurm(True, "mpich", BOTH, "pmi2"),
    checks.check_loopback(None),
    checks.check_proxies({}),
    checks.check_proxies({"HTTP_PROXY": "proxy:1"}),
    checks.check_shared_memory(8 << 30, 4 << 30),
    checks.check_own_name("n1", ["10.0.0.1"], True),
    checks.check_own_name("n1", ["127.0.1.1"], False),
    checks.check_own_name("n1", [], False),
    checks.check_cores(CORES, None, 4),
    checks.check_cores(CORES, 4.0, 2),
    checks.check_gpus(0, True, 4, 1),
    checks.check_gpus(8, True, 4, 2),
    checks.check_host("n2", HERE, replace(HERE, host="n2"), None),
    checks.check_job(Ended(0, "", 3.0)),
]

BAD = [
    (checks.check_python("3.9.2", ">=3.11", "python"), "error", "needs Python >=3.11"),
    (
        checks.check_packages({"jax": "0.9.1", "flax": None}, {"jax": ">=0.9.2", "flax": ">=0.12"}),
        "error",
        "pip install 'jax>=0.9.2' 'flax>=0.12'",
    ),
    (checks.check_slurm(True, "openmpi", frozenset({"pmi2"}), "none"), "warning", "needs pmix"),
    (checks.check_slurm(True, "mpich", frozenset(), "none"), "warning", "start MPICH, which"),
    (checks.check_slurm(True, "mpich", BOTH, "pmix"), "ok", "write `srun --mpi=pmi2`, for MPICH"),
    (checks.check_loopback("refused"), "error", "ip link set lo up"),
    (checks.check_shared_memory(64 << 20, 60 << 20), "warning", "--shm-size=1g"),
    (checks.check_shared_memory(None, None), "warning", "--ipc=host"),
    (checks.check_own_name("n1", ["127.0.1.1"], True), "warning", "/etc/hosts of n1"),
    (checks.check_own_name("n1", ["::1"], True), "warning", "/etc/hosts of n1"),
    (checks.check_cores(CORES, None, 5), "warning", "Ranks share cores"),
    (checks.check_cores(CORES, 1.5, 2), "warning", "--cpuset-cpus"),
    (checks.check_gpus(2, False, 2, 1), "warning", "jax[cuda13]"),
    (checks.check_gpus(3, True, 2, 2), "warning", "With 2 each, 1 ranks can run here"),
    (checks.check_host("n2", HERE, "no answer", None), "error", "ssh n2 true"),
    (checks.check_host("n2", HERE, HERE, "unknown"), "error", "in /etc/hosts of each"),
    (checks.check_host("n2", HERE, replace(HERE, package=None), None), "error", "install it there"),
    (
        checks.check_host("n2", HERE, replace(HERE, version="3.12.1"), None),
        "error",
        "same versions",
    ),
    (
        checks.check_host("n2", HERE, replace(HERE, versions={"jax": "0.9.2"}), None),
        "error",
        "same versions",
    ),
    (checks.check_job(Ended(1, "Traceback\nValueError: no", 3.0)), "error", "ValueError: no"),
    (checks.check_job(Ended(None, "", 30.0)), "error", ""),
]


@pytest.mark.parametrize("check", GOOD, ids=str)
def test_nothing_to_do(check):
    assert check.verdict == "ok"
    assert not check.advice


@pytest.mark.parametrize(("check", "verdict", "advice"), BAD, ids=str)
def test_what_to_do(check, verdict, advice):
    assert check.verdict == verdict
    assert advice in check.advice


def test_a_command_that_hangs_is_stopped_with_what_it_started():
    start = time.monotonic()
    ended = probes.run_limited(["sh", "-c", "echo begun; sleep 60 | cat"], 0.3)
    assert ended.code is None
    assert ended.output == "begun\n"
    assert time.monotonic() - start < 10


def test_a_command_that_is_not_there():
    assert probes.run_limited(["no-such-command"]).code == 127


def test_another_host_is_asked_through_the_remote_shell(tmp_path):
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    mine = probes.ask_interpreter(sys.executable, ["jax", "no-such-package"])
    theirs = probes.ask_interpreter(sys.executable, ["jax", "no-such-package"], "n2", str(shell))
    assert mine == theirs
    assert mine.package.endswith("multimesh/__init__.py")
    assert mine.versions["jax"]
    assert mine.versions["no-such-package"] is None


def test_a_host_that_cannot_be_reached():
    answer = probes.ask_interpreter(sys.executable, [], "n2", "false")
    assert answer == "false ended with code 1: no answer"


def test_what_multimesh_needs():
    python, required = probes.requirements()
    assert python == ">=3.11"
    assert required["mpi4py"] == ">=4.0"
    assert {"jax", "jaxlib", "flax", "optax", "numpy"} < set(required)


def test_this_machine(doctor):
    ended = doctor()
    assert ended.code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("ok       test job    2 ranks met")]
    assert lines[-1].endswith(" 0 with errors")


def test_a_python_that_cannot_run_ranks(doctor, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken\nexit 3\n")
    python.chmod(0o755)
    ended = doctor(python, "-c", "pass")
    assert ended.code == 1
    assert f"error    Python      {python} ended with code 3: broken" in ended.stdout
    assert "test job" not in ended.stdout


def test_a_mistake_in_the_arguments(doctor):
    ended = doctor("--hosts", "n1:0")
    assert ended.code == 1
    assert "error    arguments   A host needs at least one place." in ended.stdout


@pytest.fixture
def doctor(python):
    """Runs `mmrun --doctor WORDS...`."""
    return lambda *words: python("-m", "multimesh.launch.mmrun", "--doctor", *words)
