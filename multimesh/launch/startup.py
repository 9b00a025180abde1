"""`init`: chooses the devices, and joins the ranks where a launcher started several.

In a plain `python` run it sets the number of CPU devices and nothing else: no MPI, no sockets.
Under a launcher all ranks take part. They first compare what each was asked for, so that a
mistake is the same error on all of them and leaves none waiting.
"""

import functools
import logging
import os
from dataclasses import dataclass

from multimesh import _mpi
from multimesh.config import read_config
from multimesh.errors import StartupError
from multimesh.launch import failure, wire
from multimesh.launch.environment import Launcher, detect_launcher
from multimesh.launch.gpus import (
    VisibleGpus,
    count_gpus,
    divide_gpus,
    find_gpus,
    jax_can_use_gpus,
)
from multimesh.launch.places import Place, own_place, ranks_at

__all__ = ["init", "require_init"]

logger = logging.getLogger("multimesh")


@dataclass(frozen=True)
class _Request:
    """The arguments of `init`."""

    cpus: int | None
    collectives: str | None


@dataclass(frozen=True)
class _Devices:
    """What the request comes to.

    Attributes:
      cpus: CPU devices of each rank, or None for the devices that JAX finds.
      gpus: With None for `cpus`, the GPUs that this process sees, if JAX would use them.
      gpus_per_rank: How many of them each rank was asked to use, or None.
    """

    cpus: int | None = None
    gpus: VisibleGpus | None = None
    gpus_per_rank: int | None = None


@dataclass(frozen=True)
class _Answer:
    """What each rank tells the others before they are joined."""

    request: _Request
    place: Place
    devices: _Devices | None
    problem: str | None = None


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
    launcher = _parallel_launcher()
    if launcher is not None:
        _join_ranks(request, launcher)
    else:
        _start_alone(request)


def _parallel_launcher() -> Launcher | None:
    """The launcher that started several ranks, or None for a process of its own."""
    launcher = detect_launcher()
    # PMIx alone does not say how many ranks there are; MPI will.
    return launcher if launcher is not None and launcher.size != 1 else None


def _start_alone(request):
    devices = _devices_per_rank(request, 1)
    gpus = None
    if devices.gpus and devices.gpus_per_rank:
        (gpus,) = divide_gpus([devices.gpus], [own_place()], devices.gpus_per_rank)
    _configure_jax(devices.cpus, gpus, request.collectives)
    if request.collectives:
        from multimesh.launch import coordinator

        coordinator.connect_alone(read_config().start_timeout)


def _join_ranks(request, launcher):
    # Importing JAX takes seconds, and ranks that wait in MPI meanwhile keep polling: first this.
    from multimesh.launch import coordinator, ending, stall

    config = read_config()
    timeout = config.start_timeout
    # MPI starts only when every rank does. Only mmrun can see from outside which one does not.
    wire.notify(wire.Kind.JOINING, {"timeout": timeout})
    size = _mpi.load().COMM_WORLD.Get_size()
    _check_size(launcher, size)
    communicator = _mpi.communicator()
    answers = communicator.allgather(_answer(request, size))
    _check_agreement(answers)
    rank = communicator.Get_rank()
    _configure_jax(answers[rank].devices.cpus, _gpus_of_rank(rank, answers), "gloo")
    places = [answer.place for answer in answers]
    coordinator.connect_ranks(communicator, places, timeout)
    stall.monitor().start(
        rank, [place.host for place in places], config.stall_timeout, with_stacks=config.stacks
    )
    ending.end_together(communicator.Dup())


def _check_size(launcher: Launcher, size: int):
    if launcher.size is not None and launcher.size != size:
        hint = (
            "Choose the one it supports: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH."
            if launcher.name == "srun"
            else "Start with the mpiexec of the MPI that mpi4py loads; mmrun finds it."
        )
        raise StartupError(
            f"{launcher.name} started {launcher.size} ranks, but MPI on rank {launcher.rank} sees "
            f"{size}: the launcher and the MPI library do not understand each other. {hint}"
        )


def _answer(request, size) -> _Answer:
    try:
        return _Answer(request, own_place(), _devices_per_rank(request, size))
    except StartupError as error:
        return _Answer(request, own_place(), None, str(error))


def _check_agreement(answers):
    """Raises the same error on every rank, unless all ask for the same and may have it."""
    problems = {rank: answer.problem for rank, answer in enumerate(answers) if answer.problem}
    if problems:
        rank, text = next(iter(problems.items()))
        is_everywhere = set(problems.values()) == {text} and len(problems) == len(answers)
        raise StartupError(text if is_everywhere else f"On rank {rank}: {text}")
    wishes = [
        (answer.request, answer.devices.cpus, answer.devices.gpus_per_rank) for answer in answers
    ]
    for rank, (request, cpus, gpus) in enumerate(wishes):
        if wishes[rank] != wishes[0]:
            first = wishes[0][0]
            raise StartupError(
                "All ranks must ask init for the same. Got "
                f"cpus={first.cpus!r}, collectives={first.collectives!r} on rank "
                f"0, cpus={request.cpus!r}, collectives={request.collectives!r} on rank {rank} "
                f"({wishes[0][1] or wishes[0][2]} and {cpus or gpus} devices per rank)."
            )


def _gpus_of_rank(rank, answers) -> tuple[int, ...] | None:
    """The GPUs of this rank, or None where no rank is to use any."""
    if not any(answer.devices.gpus for answer in answers):
        return None
    visible = [answer.devices.gpus or VisibleGpus() for answer in answers]
    places = [answer.place for answer in answers]
    gpus = divide_gpus(visible, places, answers[0].devices.gpus_per_rank)
    here = ranks_at(places[rank], places)
    used, found = sum(len(gpus[peer]) for peer in here), len(visible[rank].names)
    if rank == here[0] and visible[rank].per_task is None and used < found:
        logger.warning(
            "%d of the %d GPUs on %s are used: one for each rank, unless mmrun is told "
            "--devices-per-rank.",
            used,
            found,
            places[rank].host,
        )
    return gpus[rank]


def _devices_per_rank(request, size) -> _Devices:
    """Divides the devices among the ranks, if it is not too late to ask for any."""
    from multimesh import _compat

    if _compat.backends_have_started():
        raise StartupError(
            "multimesh.init was called after JAX had started. Call it at the top of the program: "
            "before jax.devices(), before arrays are made, before anything is jitted."
        )
    cpus, override = request.cpus, read_config().devices_per_rank
    if cpus is None:
        gpus = _visible_gpus()
        return _Devices(gpus=gpus, gpus_per_rank=override) if gpus else _Devices(cpus=override)
    if override is not None:
        return _Devices(cpus=override)
    if cpus % size:
        raise StartupError(
            f"cpus must be a multiple of the number of ranks. Got cpus={cpus} and {size} ranks. "
            f"Use cpus={max(1, cpus // size) * size}, or another number of ranks."
        )
    return _Devices(cpus=cpus // size)


def _visible_gpus() -> VisibleGpus | None:
    """The GPUs that JAX would use in this process, or None."""
    import jax

    if not jax_can_use_gpus(jax.config.jax_platforms):
        return None
    gpus = find_gpus(os.environ, count_gpus())
    return gpus if gpus.names else None


def _configure_jax(cpus, gpus, collectives):
    import jax

    if cpus is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpus)
    if gpus is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus)))
    if collectives:
        jax.config.update("jax_cpu_collectives_implementation", collectives)
