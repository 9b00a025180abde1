"""Asks an interpreter which MPI its mpi4py loads, in a process of its own.

It is the first thing that `mmrun` does, so this file imports little: that interpreter thinks for as
long as it takes to import the rest.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["Probe", "start_quietly", "with_home"]

_PROBE = """
import sys
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
print(MPI.Get_library_version().split("\\n")[0].strip("\\0"))
with open("/proc/self/maps") as maps:
    print(next((line.split()[-1] for line in maps if "/libmpi" in line), ""))
print(sys.prefix)
"""


class Probe:
    """An interpreter that is asked which MPI it loads; `library.Question` reads the answer.

    Attributes:
      interpreter: The Python.
      process: Its process, which writes the answer and ends.
    """

    def __init__(self, interpreter: str):
        self.interpreter = interpreter
        self.process = start_quietly([interpreter, "-P", "-c", _PROBE])

    def drop(self) -> None:
        """Ends the process: nobody wants to know."""
        self.process.kill()
        self.process.communicate()


def start_quietly(command: Sequence[str]) -> subprocess.Popen:
    """Starts a command that reads nothing, and whose output is read later."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_home(os.environ),
    )


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Adds HOME where it is not set, as in some containers: Open MPI does nothing without it."""
    home = os.path.expanduser("~")
    return {"HOME": home if os.path.isabs(home) else "/"} | dict(environ)
