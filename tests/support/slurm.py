"""Submits jobs to a SLURM and waits for them; knows nothing of where it comes from."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support import jobs

__all__ = ["Job", "State", "environment", "node_count", "salloc", "submit"]

TIME_LIMIT = 240
_POLL_SECONDS = 0.1
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class State:
    """What SLURM says of a job.

    Attributes:
      name: "PENDING", "RUNNING", "COMPLETED", ...
      code: Exit code of the batch script.
      restarts: How often it went back to the queue.
    """

    name: str
    code: int
    restarts: int


@dataclass(frozen=True)
class Job:
    """A batch job. `log` is the file that its output goes to."""

    number: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def state(self) -> State:
        said = _ask("scontrol", "show", "job", "--oneliner", self.number)
        fields = dict(re.findall(r"(JobState|ExitCode|Restarts)=(\S+)", said))
        code = int(fields["ExitCode"].partition(":")[0])
        return State(fields["JobState"], code, int(fields["Restarts"]))

    def wait(self) -> State:
        """Waits until it has ended for good."""
        return self.wait_until(lambda: self.state().name in _ENDED) and self.state()

    def wait_until(self, condition) -> bool:
        """Waits until `condition()` is true.

        Raises:
          TimeoutError: It took too long; the message has the job's output.
        """
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.number}: {self.state()}\n{self.output}")
            time.sleep(_POLL_SECONDS)
        return True

    def signal(self, name):
        """Signals the batch script, as SLURM does before a time limit with `--signal=B:NAME`."""
        _ask("scancel", f"--signal={name}", "--batch", self.number)

    def cancel(self):
        _ask("scancel", self.number)

    def start_now(self):
        """Ends the two minutes that SLURM lets pass before it starts a requeued job again."""
        _ask("scontrol", "update", f"JobId={self.number}", "StartTime=now")


def environment(**variables) -> dict[str, str]:
    """An environment in which `mmrun` and `python` are those of the tests."""
    environ = jobs.clean_environment() | variables
    folders = (Path(sys.executable).parent, jobs.REPOSITORY / "scripts", environ["PATH"])
    return environ | {"PATH": os.pathsep.join(map(str, folders))}


def submit(script, *arguments, options=(), **variables) -> Job:
    """Submits a batch script, from its folder."""
    script = Path(script)
    command = ["sbatch", "--parsable", f"--output={script.stem}.out", *options, script.name]
    said = _ask(*command, *arguments, cwd=script.parent, env=environment(**variables))
    return Job(said.strip(), script.with_suffix(".out"))


def salloc(tasks, *command, options=(), cwd=None, **variables) -> subprocess.CompletedProcess:
    """Runs a command inside an allocation, as from the shell of an interactive job."""
    return subprocess.run(
        ["salloc", "--quiet", f"--ntasks={tasks}", *options, *map(str, command)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )


def node_count() -> int:
    """Number of nodes that are up; 0 without a SLURM."""
    if shutil.which("sinfo") is None:
        return 0
    command = ["sinfo", "--noheader", "--states=idle,alloc,mix", "--format=%D"]
    said = subprocess.run(command, capture_output=True, text=True)
    return sum(map(int, said.stdout.split())) if said.returncode == 0 else 0


def _ask(*command, **options):
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT, **options
    ).stdout
