"""Understands PROGRAM ARGS... of mmrun: is it Python, and which interpreter runs it?"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multimesh.errors import StartupError

__all__ = ["Program", "has_input", "parse_program"]

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Program:
    """What each rank runs.

    Attributes:
      interpreter: The Python that supervises the rank, and runs the program if it is Python.
      options: Options of that interpreter.
      arguments: The program and its arguments; for Python, what follows the interpreter's options.
      is_python: Whether the interpreter runs `arguments`, or they are a command of their own.
    """

    interpreter: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    is_python: bool

    def rank_command(self, *, bind: bool, has_input: bool) -> list[str]:
        """The command line of one rank.

        Args:
          bind: Whether the rank gives itself a share of the cores.
          has_input: Whether what is typed reaches rank 0. Not every MPI passes on the end of a
            pipe or a file, for which the program would then wait.
        """
        flags = ["--bind"] if bind else []
        if not has_input:
            flags.append("--no-input")
        if not self.is_python:
            flags.append("--exec")
        return self._start_of_rank(flags)

    def in_place_command(self) -> list[str]:
        """The command line of the program in a rank that has been started already."""
        return self._start_of_rank(["--in-place"]) if self.is_python else list(self.arguments)

    def _start_of_rank(self, flags):
        if {"-P", "-I"} & set(self.options) or os.environ.get("PYTHONSAFEPATH"):
            flags.append("--safe-path")
        # With -P nothing in the working directory can hide a module that the start needs.
        start = [self.interpreter, *self.options, "-P", "-m", "multimesh.launch.rank"]
        return [*start, *flags, "--", *self.arguments]


def parse_program(words: Sequence[str]) -> Program:
    """Parses `python [OPTIONS] train.py ARGS...`, `train.py ARGS...`, or any other command.

    Args:
      words: PROGRAM and ARGS of mmrun.

    Returns:
      The program.

    Raises:
      StartupError: There is no such program.
    """
    name = words[0]
    if name.endswith(".py"):
        return _python_program(sys.executable, words)
    path = shutil.which(name)
    if path is None and name in ("python", "python3"):
        path = sys.executable  # mmrun was called by its path, without an activated environment
    if path is None:
        raise StartupError(f"{_why_not(name)} Expected a Python file or a command.")
    if Path(path).name.startswith("python"):
        return _python_program(path, words[1:])
    interpreter = _shebang_python(path)
    if interpreter:
        return _python_program(interpreter, [path, *words[1:]])
    return Program(sys.executable, (), tuple(words), is_python=False)


def _why_not(name):
    """Why a name is no command."""
    if os.path.isdir(name):
        return f"{name!r} is a folder."
    if os.path.exists(name):
        return (
            f"The file {name!r} is not executable: run `chmod +x` on it, or name its interpreter."
        )
    return f"There is no program {name!r}."


def _python_program(interpreter, words):
    """Splits the interpreter's options from the program."""
    first = 0
    while first < len(words) and words[first].startswith("-"):
        if words[first].startswith(("-m", "-c")):
            break
        first += 2 if words[first] in _OPTIONS_WITH_VALUE else 1
    options, program = tuple(words[:first]), tuple(words[first:])
    if not program or (program[0] in ("-m", "-c") and len(program) == 1):
        got = " ".join(words) or "nothing"
        raise StartupError(f"Expected a program for {interpreter} to run. Got {got}.")
    if not program[0].startswith("-") and not Path(program[0]).exists():
        raise StartupError(f"There is no file {program[0]!r} in {os.getcwd()}.")
    return Program(interpreter, options, program, is_python=True)


def _shebang_python(path):
    """The interpreter of an installed Python command such as pytest, or None."""
    with open(path, "rb") as file:
        first_line = file.readline(512)
    words = first_line[2:].decode(errors="replace").split()
    if first_line.startswith(b"#!") and len(words) == 1 and "python" in Path(words[0]).name:
        return words[0]
    return None


def has_input() -> bool:
    """Whether somebody may type something for rank 0: standard input is a terminal."""
    return sys.stdin is not None and os.isatty(sys.stdin.fileno())
