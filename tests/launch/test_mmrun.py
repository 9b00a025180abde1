"""What a user of mmrun sees: output, exit codes, and a program that does not notice mmrun."""

import os
import re
import sys
import time

import pytest
from support.processes import is_alive, wait_until

PYTHON = sys.executable


def test_each_line_has_its_rank_and_its_stream(mmrun, write):
    script = write(
        """
        import os, subprocess, sys
        print("out", flush=True)
        print("err", file=sys.stderr)
        os.write(1, b"raw ")
        os.write(1, b"bytes\\n")
        subprocess.run(["echo", "from a child"])
        print("no newline", end="")
        """
    )
    ended = mmrun(2, script)
    assert ended.code == 0, ended.stderr
    expected = ["out", "raw bytes", "from a child", "no newline"]
    for rank in (0, 1):
        mine = [line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {line}" for line in expected]
    assert sorted(ended.stderr.splitlines()) == ["[0] err", "[1] err"]


def test_long_lines_of_many_ranks_stay_whole(mmrun, write):
    script = write(
        """
        import os
        letter = "abcd"[int(os.environ["OMPI_COMM_WORLD_RANK"])]
        for _ in range(50):
            print(letter * 20_000)
        """
    )
    ended = mmrun(4, script)
    assert ended.code == 0
    expected = [f"[{rank}] {letter * 20_000}" for rank, letter in enumerate("abcd")] * 50
    assert sorted(ended.stdout.splitlines()) == sorted(expected)


def test_a_progress_bar_leaves_its_last_state(mmrun, write):
    script = write(
        """
        import sys
        for percent in (0, 50, 100):
            print(f"\\r{percent} %", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        """
    )
    assert mmrun(1, script).stderr == "[0] 100 %\n"


DESCRIBE = """
import json, sys, __main__
names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
print(json.dumps([sys.argv, sys.path, [repr(getattr(__main__, n, "-")) for n in names]]))
print(__spec__ and __spec__.name)
class Local: pass
import pickle
print(type(pickle.loads(pickle.dumps(Local()))) is Local)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["script.py", "a", "-n", "--", "b c"],
        ["folder/script.py"],
        ["-m", "script", "-x"],
        ["-c", DESCRIBE, "y"],
        ["-O", "-W", "error", "script.py"],
        ["-P", "script.py"],
    ],
    ids=["script", "folder", "module", "code", "options", "safe-path"],
)
def test_a_program_sees_what_it_sees_under_plain_python(mmrun, python, write, tmp_path, words):
    (tmp_path / "folder").mkdir()
    write(DESCRIBE)
    write(DESCRIBE, "folder/script.py")
    # A module of the user's must not hide one that the start of a rank needs.
    write("raise ImportError('not yours')", "selectors.py")
    plain, ours = python(*words), mmrun(1, PYTHON, *words)
    assert plain.code == ours.code == 0, plain.stderr + ours.stderr
    assert ours.stdout == "".join(f"[0] {line}" for line in plain.stdout.splitlines(True))


def test_a_program_that_is_not_python(mmrun):
    ended = mmrun(2, "sh", "-c", "echo hello")
    assert ended.code == 0
    assert ended.lines == {"[0] hello", "[1] hello"}


@pytest.mark.parametrize(
    ("ending", "code", "summary"),
    [
        ("raise ValueError('mine')", 1, "failed with exit code 1"),
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("sys.exit('sorry')", 1, "failed with exit code 1"),
        ("os._exit(7)", 7, "failed with exit code 7"),
        ("os._exit(0)", 1, "left with exit code 0 before its program had ended"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL: exit code 137"),
        ("import ctypes; ctypes.string_at(0)", 139, "was killed by SIGSEGV: exit code 139"),
        ("import no_such_module", 1, "failed with exit code 1"),
    ],
    ids=["raise", "exit", "exit-text", "_exit", "_exit-0", "kill", "segfault", "import"],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_one_failing_rank_ends_the_job_with_its_code(mmrun, write, ending, code, summary, failing):
    script = write(
        f"""
        import os, signal, sys
        from mpi4py import MPI
        print("started")
        if MPI.COMM_WORLD.rank == {failing}:
            sys.stdout.write("last words\\n")
            {ending}
        MPI.COMM_WORLD.recv(source={failing})
        """
    )
    began = time.monotonic()
    ended = mmrun(2, script)
    assert time.monotonic() - began < 10
    assert ended.code == code, ended.output
    assert f"[{failing}] last words" in ended.lines
    errors = ended.stderr.splitlines()
    assert re.fullmatch(rf"mmrun: rank {failing} on \S+ {summary}", errors[-1])
    is_shown = ending.startswith(("raise", "import no"))
    assert ended.output.count("Traceback") == is_shown
    assert not any("prterun" in line or "MPI_ABORT" in line for line in errors)


def test_the_traceback_comes_once_and_last_and_is_the_users_alone(mmrun, write):
    script = write(
        """
        import sys, threading
        def deep():
            raise ValueError("mine")
        print("last words", file=sys.stderr)
        threading.Thread(target=threading.Event().wait).start()
        deep()
        """
    )
    ended = mmrun(2, script)
    errors = ended.stderr.splitlines()
    start = next(i for i, line in enumerate(errors) if "Traceback" in line)
    prefix = errors[start][:4]
    assert errors[start : start + 2] == [
        f"{prefix}Traceback (most recent call last):",
        f'{prefix}  File "{script}", line 7, in <module>',
    ]
    assert errors[-2:] == [f"{prefix}ValueError: mine", errors[-1]]
    assert ended.stderr.count("ValueError: mine") == 1
    assert f"{prefix}last words" in errors[:start]


def test_the_programs_own_excepthook_is_used(mmrun, write):
    script = write(
        """
        import sys
        sys.excepthook = lambda kind, exc, trace: print("hooked", exc)
        raise ValueError("mine")
        """
    )
    ended = mmrun(1, script)
    assert ended.code == 1
    assert ended.stdout == "[0] hooked mine\n"
    assert "Traceback" not in ended.stderr


def test_a_rank_that_never_calls_init_is_named(mmrun, write):
    script = write(
        """
        import os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(60)
        import multimesh
        multimesh.init(cpus=4)
        """
    )
    ended = mmrun(2, script, MULTIMESH_START_TIMEOUT="1")
    assert ended.code == 1
    assert re.search(r"rank 1 on \S+ did not call multimesh.init within 1 s", ended.stderr)


def test_stopping_mmrun_leaves_nothing_behind(start_mmrun, write, tmp_path):
    script = write(
        """
        import os, time
        open(f"pid{os.environ['OMPI_COMM_WORLD_RANK']}.part", "w").write(str(os.getpid()))
        os.rename(*(f"pid{os.environ['OMPI_COMM_WORLD_RANK']}" + end for end in (".part", "")))
        time.sleep(60)
        """
    )
    process = start_mmrun(2, script)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files))
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + 15
    assert "mmrun: stopped by SIGTERM" in errors
    wait_until(lambda: not any(is_alive(int(file.read_text())) for file in files))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0", "x"], "must be a whole number, 1 or more. Got '0'"),
        (["-n", "x", "x"], "must be a whole number, 1 or more. Got 'x'"),
        (["--grace", "no", "x"], "must be a positive number of seconds, at most 1000000. Got 'no'"),
        (["--start-timeout", "1e9", "x"], "at most 1000000. Got '1e9'"),
        (["-n", "2", "--hosts", "", PYTHON, "-c", "1"], "Expected hosts like"),
        (["-n", "2", os.devnull], "is not executable"),
        (["-n", "2", os.curdir], "is a folder"),
        (["-n", "2"], "expected a program"),
        (["-n", "2", "no_such_program"], "no program 'no_such_program'"),
        (["-n", "2", "no_such_script.py"], "no file 'no_such_script.py'"),
        (["-n", "2", PYTHON], "to run. Got nothing"),
    ],
)
def test_a_wrong_command_line_starts_nothing(python, words, message):
    ended = python("-m", "multimesh.launch.mmrun", *words)
    assert ended.code == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
