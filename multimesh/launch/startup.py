"""`init`: chooses the devices, and joins the ranks where a launcher started several.

It checks what it was asked for, and that it is asked once; `joining` does the work.
"""

import functools
from dataclasses import dataclass

from multimesh.errors import StartupError
from multimesh.launch import failure
from multimesh.launch.environment import Launcher, detect_launcher

__all__ = ["init", "require_init"]


@dataclass(frozen=True)
class _Request:
    """The arguments of `init`."""

    cpus: int | None
    collectives: str | None


def init(cpus: int | None = None, *, collectives: str | None = None):
    """Prepares JAX for this program; call it before anything that makes JAX look for devices.

    A second call with the same arguments does nothing.

    Args:
      cpus: Number of CPU devices in all, shared equally by the ranks: 8 are 4 on each of 2.
        `mmrun --devices-per-rank` overrides it. None leaves the devices as JAX finds them; each
        of several ranks then uses one GPU of its host, or as many as `--devices-per-rank` says.
      collectives: "gloo" makes a single process add in the same order as several ranks do, which
        gives bit-identical results at some cost in speed. Several ranks always use gloo.

    Raises:
      StartupError: The arguments are wrong or differ between ranks, JAX has already started, or
        the ranks cannot be joined. All ranks raise the same error.
    """
    launcher = _parallel_launcher()
    if launcher is not None:
        failure.install_hooks(launcher.rank, launcher.size)
    if cpus is not None and (isinstance(cpus, bool) or not isinstance(cpus, int) or cpus < 1):
        raise StartupError(f"cpus must be a positive integer or None. Got {cpus!r}.")
    if collectives not in (None, "gloo"):
        raise StartupError(f'collectives must be "gloo" or None. Got {collectives!r}.')
    _initialize(_Request(cpus, collectives))


def require_init():
    """Checks that `init` was called, where it must be.

    Raises:
      StartupError: A launcher started several ranks, and this one has not called `init`.
    """
    launcher = _parallel_launcher()
    if launcher is not None and not _initialize.cache_info().currsize:
        raise StartupError(
            f"{launcher.name} started {launcher.size or 'several'} ranks, but multimesh.init was "
            "not called. Call it at the top of the program, before JAX is used."
        )


# JAX can be started once per process, and so can this: the cache holds the request that did it.
@functools.cache
def _initialize(request):
    if _initialize.cache_info().currsize:
        raise StartupError(
            "multimesh.init was called a second time, with other arguments: "
            f"cpus={request.cpus!r}, collectives={request.collectives!r}. Call it once."
        )
    # Not at the top: mmrun and programs that never call init shall not pay for it.
    from multimesh.launch import joining

    launcher = _parallel_launcher()
    if launcher is not None:
        joining.join_ranks(request.cpus, request.collectives, launcher)
    else:
        joining.start_alone(request.cpus, request.collectives)


def _parallel_launcher() -> Launcher | None:
    """The launcher that started several ranks, or None for a process of its own."""
    launcher = detect_launcher()
    # PMIx alone does not say how many ranks there are; MPI will.
    return launcher if launcher is not None and launcher.size != 1 else None
