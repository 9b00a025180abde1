"""Every environment variable that multimesh reads, parsed and checked in one place.

MULTIMESH_DEVICES_PER_RANK   CPU devices each rank owns (set by `mmrun --devices-per-rank`)
MULTIMESH_STALL_TIMEOUT      seconds a rank waits for another before the job ends with a report
MULTIMESH_STACKS             "1": that report shows the Python stacks of every rank
MULTIMESH_START_TIMEOUT      seconds a rank waits for the others to start
MULTIMESH_DUMP               a folder that each step writes its plan and programs to
MULTIMESH_POISON             "1": fill receive buffers with NaNs before each use (for tests)
"""

import os
from dataclasses import dataclass

from multimesh.errors import StartupError

__all__ = ["LONGEST", "Config", "read_config"]

# Seconds: eleven days. Milliseconds of some 24 no longer fit into what operating systems wait for.
LONGEST = 1_000_000


@dataclass(frozen=True)
class Config:
    """The settings of this process.

    Attributes:
      devices_per_rank: CPU devices of each rank, or None to divide the total by the ranks.
      stall_timeout: Seconds to wait for another rank.
      stacks: Whether the report of a stall shows every rank's Python stacks.
      start_timeout: Seconds to wait for the other ranks at start-up.
      dump: A folder that each step writes its plan and programs to.
      poison: Whether to fill receive buffers with NaNs before each use.
    """

    devices_per_rank: int | None = None
    stall_timeout: float = 120.0
    stacks: bool = False
    start_timeout: float = 60.0
    dump: str | None = None
    poison: bool = False


def read_config(environ=None) -> Config:
    """Parses the environment.

    Args:
      environ: A mapping to read in place of `os.environ`.

    Returns:
      The settings, with defaults for what is not set.

    Raises:
      StartupError: A variable is set to something that cannot be parsed; the message names it.
    """
    environ = os.environ if environ is None else environ
    devices = _positive(environ, "MULTIMESH_DEVICES_PER_RANK", int, None)
    return Config(
        devices_per_rank=devices,
        stall_timeout=_positive(environ, "MULTIMESH_STALL_TIMEOUT", float, Config.stall_timeout),
        start_timeout=_positive(environ, "MULTIMESH_START_TIMEOUT", float, Config.start_timeout),
        stacks=_flag(environ, "MULTIMESH_STACKS"),
        dump=environ.get("MULTIMESH_DUMP") or None,
        poison=_flag(environ, "MULTIMESH_POISON"),
    )


def _flag(environ, name):
    return environ.get(name, "0") not in ("", "0")


def _positive(environ, name, kind, default):
    text = environ.get(name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError as exc:
        raise StartupError(
            f"{name} must be a positive {kind.__name__}. Got {text!r}; unset it or correct it."
        ) from exc
    if not 0 < value <= LONGEST:
        raise StartupError(
            f"{name} must be positive, and at most {LONGEST}. Got {text!r}; unset it or correct it."
        )
    return value
