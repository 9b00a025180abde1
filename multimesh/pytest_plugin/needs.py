"""What a test's `mpi` marks ask for.

Marks of a module, a class, a function and a parameter add up: an inner one overrides those
arguments of an outer one that it repeats.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from multimesh.errors import UsageError

__all__ = ["Needs", "arguments_of", "needs_of", "time_limit"]


@dataclass(frozen=True)
class Needs:
    """What a test needs; tests of one file with equal needs share an MPI job.

    Attributes:
      ranks: Number of ranks.
      timeout: Seconds that the job may take.
      env: Environment variables of the job, as sorted pairs.
    """

    ranks: int
    timeout: float
    env: tuple[tuple[str, str], ...] = ()


def needs_of(item) -> Needs | None:
    """What a collected test needs.

    Returns:
      Its needs, or None for a test without the mark.

    Raises:
      pytest.UsageError: A mark's arguments are wrong, or none says how many ranks.
    """
    if item.get_closest_marker("mpi") is None:
        return None
    try:
        arguments = arguments_of(item)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    ranks = arguments.get("ranks")
    if not isinstance(ranks, int):
        # A sequence is left where nothing makes a test of each: in unittest's classes, and in the
        # mark of a parameter.
        raise pytest.UsageError(
            f"{item.nodeid}: mpi needs a number of ranks here. Got ranks={ranks!r}. Only the mark "
            "of a function, a class or a module takes several numbers."
        )
    timeout = arguments.get("timeout", time_limit(item.config))
    return Needs(ranks, float(timeout), tuple(sorted(arguments.get("env", {}).items())))


def arguments_of(node) -> dict:
    """The checked arguments of all `mpi` marks that apply to a node of pytest's tree.

    Raises:
      UsageError: An argument is wrong; the message names the node.
    """
    arguments: dict[str, Any] = {}
    for parent in node.listchain():
        for mark in parent.own_markers:
            if mark.name == "mpi":
                arguments |= _checked(mark, node.nodeid)
    return arguments


def time_limit(config) -> float:
    """The `mpi_timeout` setting, in seconds.

    Raises:
      pytest.UsageError: It is not a positive number.
    """
    text = config.getini("mpi_timeout")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _is_timeout(seconds):
        raise pytest.UsageError(f"mpi_timeout must be a positive number of seconds. Got {text!r}.")
    return seconds


def _signature(ranks=None, *, timeout=None, env=None):
    """What `pytest.mark.mpi` takes."""


def _checked(mark, where) -> dict:
    try:
        arguments = inspect.signature(_signature).bind(*mark.args, **mark.kwargs).arguments
    except TypeError as error:
        raise UsageError(
            f"{where}: mpi takes ranks, timeout and env, such as mpi(ranks=2). Got: {error}."
        ) from None
    for name, (is_right, expected) in _RULES.items():
        if name in arguments and not is_right(arguments[name]):
            raise UsageError(
                f"{where}: mpi's {name} must be {expected}. Got {name}={arguments[name]!r}."
            )
    return arguments


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_ranks(value):
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(map(_is_count, value)) and len(set(value)) == len(value)
    return _is_count(value)


def _is_timeout(value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _is_env(value):
    return isinstance(value, Mapping) and all(
        isinstance(word, str) for pair in value.items() for word in pair
    )


_RULES = {
    "ranks": (_is_ranks, "a positive integer, or a sequence of different ones"),
    "timeout": (_is_timeout, "a positive number of seconds"),
    "env": (_is_env, "a mapping of strings to strings"),
}
