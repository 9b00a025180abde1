"""Submits jobs to the SLURM of `slurm_lab`, and waits for them."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support import jobs
from support.host_lab import HOSTS, HostLab

__all__ = ["Job", "Slurm", "State"]

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
    """A batch job whose script has `--output=%x-%j.out`, or `%x-%A_%a.out` for an array.

    Attributes:
      number: The job's number; for a task of an array, also the task's: `7_0`.
      script: The batch script.
    """

    number: str
    script: Path

    @property
    def output(self) -> str:
        log = self.script.with_name(f"{self.script.stem}-{self.number}.out")
        return log.read_text() if log.exists() else ""

    def state(self) -> State:
        said = _ask("scontrol", "show", "job", "--oneliner", self.number)
        fields = dict(re.findall(r"(JobState|ExitCode|Restarts)=(\S+)", said))
        code = int(fields["ExitCode"].partition(":")[0])
        return State(fields["JobState"], code, int(fields["Restarts"]))

    def wait(self) -> State:
        """Waits until it has ended for good."""
        self.wait_until(lambda: self.state().name in _ENDED)
        return self.state()

    def wait_until(self, condition):
        """Waits until `condition()` is true.

        Raises:
          TimeoutError: It took too long; the message has the job's output.
        """
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.number}: {self.state()}\n{self.output}")
            time.sleep(_POLL_SECONDS)

    def signal(self, name):
        """Signals the batch script, as SLURM does before a time limit with `--signal=B:NAME`."""
        _ask("scancel", f"--signal={name}", "--batch", self.number)

    def cancel(self):
        _ask("scancel", self.number)

    def wait_for_requeue(self):
        """Waits until it is in the queue again, and shortens its two minutes there."""
        self.wait_until(lambda: self.state().restarts and self.state().name == "PENDING")
        # A node refuses a job that starts in the second in which it ended there.
        _ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+3seconds")


@dataclass(frozen=True)
class Slurm:
    """Submits jobs as from the first of its nodes."""

    hosts: HostLab

    def submit(self, script: Path, *arguments, options=(), **variables) -> Job:
        """Submits a batch script, from its folder."""
        command = ["sbatch", "--parsable", *options, script.name, *arguments]
        said = _ask(*command, cwd=script.parent, env=_environment(variables))
        return Job(said.strip(), script)

    def salloc(self, tasks, *words, **variables) -> subprocess.CompletedProcess:
        """Runs a command inside an allocation, as from the shell of an interactive job."""
        command = ["salloc", "--quiet", f"--ntasks={tasks}", "--nodes=1", *words]
        return subprocess.run(
            self.hosts.on(HOSTS[0], *command),
            env=_environment(variables),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )


def _environment(variables):
    """An environment in which `mmrun` and `python` are those of the tests."""
    environ = jobs.clean_environment() | jobs.COMPILE_QUICKLY | variables
    folders = (Path(sys.executable).parent, jobs.REPOSITORY / "scripts", environ["PATH"])
    return environ | {"PATH": os.pathsep.join(map(str, folders))}


def _ask(*command, **options):
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT, **options
    ).stdout
