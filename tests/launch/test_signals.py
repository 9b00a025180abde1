"""Jobs that are told to end: notices of preemption, Ctrl-C, a killed mmrun, stopped ranks."""

import functools
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from support import processes
from support.jobs import REPOSITORY, clean_environment
from support.processes import is_alive, status

from multimesh.launch.mmrun.verdict import Request, Verdict
from multimesh.launch.wire import Kind, Message

TIME_LIMIT = 60
wait_until = functools.partial(processes.wait_until, seconds=TIME_LIMIT)


class Running:
    """A job that a test sends signals to, once every rank has written its process id."""

    def __init__(self, folder, command, ranks=2, stdin=subprocess.DEVNULL):
        # Under nohup the tests ignore SIGHUP, and mmrun would stay with that.
        self.process = subprocess.Popen(
            ["env", "--default-signal=HUP", *map(str, command)],
            cwd=folder,
            env=clean_environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._files = [folder / f"ready{rank}" for rank in range(ranks)]

    def wait_until_ready(self):
        wait_until(lambda: self.process.poll() is not None or all(f.exists() for f in self._files))
        self.pids = [int(file.read_text()) for file in self._files]

    def end(self):
        output, errors = self.process.communicate(timeout=TIME_LIMIT)
        self.output, self.errors = output, errors.splitlines()
        return self.process.returncode


@pytest.fixture
def start(tmp_path, write):
    """Starts 2 ranks of a script under mmrun; `ready()` in it says that it may be sent signals."""
    jobs = []
    prelude = """
import os, signal, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
def ready():
    with open("part%d" % rank, "w") as file:
        file.write(str(os.getpid()))
    os.rename("part%d" % rank, "ready%d" % rank)
"""

    def start(source, *options, stdin=subprocess.DEVNULL):
        script = write(source)
        script.write_text(prelude + script.read_text())
        mmrun = [sys.executable, REPOSITORY / "scripts" / "mmrun", "-n", 2, *options]
        jobs.append(Running(tmp_path, [*mmrun, script], stdin=stdin))
        jobs[-1].wait_until_ready()
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate(timeout=TIME_LIMIT)  # closes what a failed test left open


SLEEP = "ready()\ntime.sleep(60)\n"
SAVE = """
def save(*_):
    time.sleep(0.3)
    print("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save)
ready()
time.sleep(60)
"""
IGNORE = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
ready()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_ranks_may_save_on_a_notice(start, number):
    job = start(SAVE)
    job.process.send_signal(number)
    assert job.end() == 143
    assert sorted(job.output.splitlines()) == ["[0] saved", "[1] saved"]
    assert job.errors[-1] == f"mmrun: preempted by {number.name}; all ranks ended in time"


def test_a_notice_to_one_rank_is_one_to_all(start):
    job = start(SAVE)
    _, supervisor = status(job.pids[1])
    os.kill(supervisor, signal.SIGUSR1)
    assert job.end() == 143
    assert sorted(job.output.splitlines()) == ["[0] saved", "[1] saved"]
    assert job.errors[-1] == "mmrun: preempted by SIGUSR1; all ranks ended in time"


def test_a_program_without_use_for_a_notice_ends_at_once(start):
    job = start(SLEEP)
    began = time.monotonic()
    job.process.terminate()
    assert job.end() == 143
    assert time.monotonic() - began < 5
    assert job.errors[-1] == "mmrun: stopped by SIGTERM"


def test_ranks_that_do_not_end_are_killed_after_the_grace(start):
    job = start(IGNORE, "--grace", "1")
    job.process.terminate()
    assert job.end() == 143
    assert job.errors[-1] == "mmrun: preempted by SIGTERM; killed after 1 s of grace"
    wait_until(lambda: not any(map(is_alive, job.pids)))


def test_an_interrupt_reaches_every_rank_and_leaves_it_time(start):
    job = start(
        """
        try:
            ready()
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.5 * rank)
            print("cleaned up")
            raise
        """
    )
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert sorted(job.output.splitlines()) == ["[0] cleaned up", "[1] cleaned up"]
    assert [line[4:] for line in job.errors].count("KeyboardInterrupt") == 1
    assert job.errors[-2:] == [
        "[0] KeyboardInterrupt",
        "mmrun: interrupted by SIGINT; all ranks ended in time",
    ]


def test_an_interrupt_ends_a_rank_that_waits_inside_mpi_for_another(start):
    job = start(
        """
        import multimesh
        if rank == 0:
            time.sleep(2)
        ready()
        if rank == 1:
            multimesh.init(cpus=2)
        time.sleep(60)
        """
    )
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert time.monotonic() - began < 10
    assert job.errors[-1] == "mmrun: interrupted by SIGINT; all ranks ended in time"


def test_a_second_interrupt_kills(start):
    job = start(IGNORE)
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert job.end() == 130
    assert job.errors[-1] == "mmrun: stopped by SIGINT"


STUBBORN_CHILD = """
import subprocess
code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
start = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN);" + code]
child = subprocess.Popen(start, stdout=subprocess.PIPE)
with open("child%d" % rank, "w") as file:
    file.write(child.stdout.readline().decode())
ready()
"""


@pytest.mark.parametrize("ending", ["raise", "kill mmrun", "kill supervisor"])
def test_no_process_outlives_a_job_that_did_not_end_well(start, tmp_path, ending):
    end = "if rank == 0: raise ValueError\n" if ending == "raise" else ""
    job = start(STUBBORN_CHILD + end + "time.sleep(60)\n")
    children = [int((tmp_path / f"child{rank}").read_text()) for rank in (0, 1)]
    if ending == "kill mmrun":
        job.process.kill()
    elif ending == "kill supervisor":
        _, supervisor = status(job.pids[1])
        os.kill(supervisor, signal.SIGKILL)
    assert job.end() != 0
    wait_until(lambda: not any(map(is_alive, job.pids + children)))


def test_a_stopped_rank_is_named(start):
    job = start("ready()\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)\n")
    wait_until(lambda: status(job.pids[1])[0] == "T")
    os.kill(job.pids[1], signal.SIGCONT)
    time.sleep(0.3)
    job.process.terminate()
    assert job.end() == 143
    stopped, goes_on = job.errors[-3:-1]
    assert re.fullmatch(r"mmrun: rank 1 on \S+ is stopped by SIGSTOP", stopped)
    assert re.fullmatch(r"mmrun: rank 1 on \S+ goes on", goes_on)


def test_rank_0_reads_what_is_typed(start):
    ours, theirs = pty.openpty()
    source = "ready()\nif rank == 0: print('got', input())\n"
    job = start(source, stdin=theirs)
    os.write(ours, b"hello\n\x04")
    assert job.end() == 0, job.errors
    assert "got hello" in job.output


PREEMPTED = """
import multimesh
multimesh.init(cpus=2)
for step in range(1000):
    if step == 1:
        ready()
    if multimesh.preempted():
        assert multimesh.preempted()
        print("saves at", step)
        break
    time.sleep(0.02 + 0.01 * rank)
"""


def test_preempted_is_true_at_the_same_step_on_all_ranks(start):
    job = start(PREEMPTED)
    os.kill(job.pids[1], signal.SIGUSR1)  # straight to one rank, as without mmrun
    assert job.end() == 143, job.errors
    steps = {line.partition("saves at ")[2] for line in job.output.splitlines() if "saves" in line}
    assert len(steps) == 1
    assert job.output.count("saves at") == 2


def test_a_program_that_never_asks_still_ends_by_sigterm(start):
    job = start("import multimesh\nmultimesh.init(cpus=2)\nready()\ntime.sleep(60)\n")
    began = time.monotonic()
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.end() == 143
    assert time.monotonic() - began < 5
    assert re.fullmatch(r"mmrun: rank 0 on \S+ was killed by SIGTERM: .*", job.errors[-1])


def test_preempted_in_one_process(python, write):
    script = write(
        """
        import os, signal, sys, threading
        signal.signal(signal.SIGTERM, lambda *_: print("the program's own handler"))
        import multimesh
        assert not multimesh.preempted()
        assert "jax" not in sys.modules
        os.kill(os.getpid(), signal.SIGTERM)
        assert multimesh.preempted() and multimesh.preempted()
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    ended = python(script)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.splitlines() == ["the program's own handler", "-15"]


def test_preempted_outside_the_main_thread_says_so(python, write):
    script = write(
        """
        import multimesh, threading
        def ask():
            try:
                multimesh.preempted()
            except ValueError as error:
                print(error)
        threading.Thread(target=ask, name="trainer").start()
        """
    )
    ended = python(script)
    assert "must first be called in the main thread" in ended.stdout, ended.stderr
    assert "Got 'trainer'" in ended.stdout


# What mmrun makes of it, without processes.


def verdict_after(*messages, request=None):
    verdict = Verdict(2)
    for rank in (0, 1):
        verdict.hear(message(Kind.HELLO, rank, '{"host": "n1", "is_python": true}'))
    if request:
        verdict.ask(Request.by(request))
    for each in messages:
        verdict.hear(each)
    return verdict


def message(kind, rank, payload=""):
    return Message(kind, rank, payload.encode())


def gone(rank, code, number=0):
    return message(Kind.EXIT, rank, f'{{"code": {code}, "signal": {number}}}')


def test_a_rank_that_fails_while_it_saves_gives_the_job_its_code():
    error = message(Kind.FAILING, 1, '{"code": 5, "traceback": "mine", "culprit": null}')
    failure = verdict_after(error, request=signal.SIGTERM).failure
    assert (failure.rank, failure.exit_code, failure.traceback) == (1, 5, "mine")


def test_a_rank_may_answer_a_notice_with_its_code():
    assert verdict_after(gone(0, 143), request=signal.SIGUSR1).failure is None


def test_the_culprit_of_a_stall_is_named():
    stall = message(Kind.FAILING, 0, '{"code": 1, "traceback": "mine", "culprit": 1}')
    stop = message(Kind.STOPPED, 1, '{"signal": 19}')
    failure = verdict_after(stop, stall).failure
    assert failure.reason == "rank 1 on n1 was stopped by SIGSTOP while rank 0 on n1 waited for it"
    finished = message(Kind.FINISHED, 1)
    failure = verdict_after(finished, stall).failure
    assert failure.reason == (
        "rank 1 on n1 ended with exit code 0 while rank 0 on n1 waited for it"
    )


def test_a_stopped_rank_is_the_culprit_whatever_others_make_of_it():
    stop = message(Kind.STOPPED, 1, '{"signal": 19}')
    stall = message(Kind.FAILING, 0, '{"code": 1, "traceback": "mine", "culprit": 0}')
    failure = verdict_after(stop, stall).failure
    assert failure.reason == "rank 1 on n1 was stopped by SIGSTOP while rank 0 on n1 waited for it"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_ends_before_init_is_not_waited_for(is_first):
    joining = message(Kind.JOINING, 0, '{"timeout": 60}')
    ending = [message(Kind.FINISHED, 1), gone(1, 0)]
    messages = [joining, *ending] if is_first else [*ending, joining]
    failure = verdict_after(*messages).failure
    assert failure.reason.startswith("rank 1 on n1 ended with exit code 0 before it called")
