"""`init`: chooses the devices, and joins the ranks where a launcher started several.

It checks what it was asked for, and that it is asked once; `joining` does the work.
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

from multimesh.errors import StartupError
from multimesh.launch import failure
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.request import Request

__all__ = ["init", "require_init"]


def init(
    cpus: int | None = None,
    *,
    gpus: int | None = None,
    collectives: str | None = None,
    distributed: bool | None = None,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Any = None,
    initialization_timeout: float | None = None,
    dump: str | os.PathLike | None = None,
    debug: bool = False,
):
    """Prepares JAX for this program; call it before anything that makes JAX look for devices.

    A second call with the same arguments does nothing.

    Args:
      cpus: Number of CPU devices in all, shared equally by the ranks: 8 are 4 on each of 2.
        `mmrun --devices-per-rank` overrides it. None leaves the devices as JAX finds them; each
        of several ranks then uses one GPU of its host, or as many as `--devices-per-rank` says.
      gpus: Or the number of GPUs in all, shared equally by the ranks.
      collectives: "gloo" makes a single process add in the same order as several ranks do, which
        gives bit-identical results at some cost in speed. Several ranks always use gloo.
      distributed: False: it is an error if several ranks were started. True: if not.
      coordinator_address: Has no meaning here, as a warning says: ranks find each other by MPI.
      num_processes: How many ranks there must be; the launcher says how many there are.
      process_id: Which of them this must be.
      local_device_ids: Has no meaning here; likewise.
      initialization_timeout: Seconds to wait for the other ranks, in place of
        MULTIMESH_START_TIMEOUT.
      dump: A folder into which each step that is built writes its plan, and each task's jaxpr and
        optimized HLO.
      debug: Whether tracebacks show the frames inside of JAX, and the report of a stall every
        rank's Python stacks.

    Raises:
      StartupError: The arguments are wrong or differ between ranks, JAX has already started, or
        the ranks cannot be joined. All ranks raise the same error.
    """
    launcher = _parallel_launcher()
    if launcher is not None:
        failure.install_hooks(launcher.rank, launcher.size)
    request = Request(
        cpus=cpus,
        gpus=gpus,
        collectives=collectives,
        distributed=distributed,
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=_plain(local_device_ids),
        initialization_timeout=initialization_timeout,
        dump=os.fspath(dump) if isinstance(dump, os.PathLike) else dump,
        debug=debug,
    )
    request.check()
    before = dict(os.environ)
    try:
        _initialize(request)
    except StartupError:  # what is refused leaves nothing behind
        for name in _settings(request):
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in _settings(request) if name in before})
        raise


def _plain(ids: Any) -> Any:
    return tuple(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else ids


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
            f"{request.common()}. Call it once."
        )
    # Not at the top: mmrun and programs that never call init shall not pay for it.
    from multimesh.launch import joining

    os.environ.update(_settings(request))
    launcher = _parallel_launcher()
    if launcher is not None:
        joining.join_ranks(request, launcher)
    else:
        joining.start_alone(request)


def _settings(request: Request) -> dict[str, str]:
    """What a request says by environment variables, as a user could."""
    settings = {
        "MULTIMESH_DUMP": request.dump,
        "MULTIMESH_STACKS": "1" if request.debug else None,
        "MULTIMESH_START_TIMEOUT": request.initialization_timeout,
    }
    return {name: str(value) for name, value in settings.items() if value is not None}


def _parallel_launcher() -> Launcher | None:
    """The launcher that started several ranks, or None for a process of its own."""
    launcher = detect_launcher()
    # PMIx alone does not say how many ranks there are; MPI will.
    return launcher if launcher is not None and launcher.size != 1 else None
