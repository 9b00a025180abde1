"""Starts JAX for `init`: alone, or together with the other ranks.

In a plain `python` run it sets the devices and nothing else: no MPI, no sockets. Under a launcher
all ranks take part. They first compare what each was asked for, so that a mistake is the same
error on all of them and leaves none waiting.
"""

import contextlib
import faulthandler
import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax

from multimesh import _mpi
from multimesh.config import read_config
from multimesh.errors import StartupError
from multimesh.launch import coordinator, ending, stall, wire
from multimesh.launch.devices import Devices, configure_jax, find_devices
from multimesh.launch.environment import Launcher
from multimesh.launch.gpus import VisibleGpus, divide_gpus
from multimesh.launch.places import Place, own_place, ranks_at
from multimesh.launch.request import Request

__all__ = ["join_ranks", "start_alone"]

logger = logging.getLogger("multimesh")

_MMRUN_COMES_FIRST = 5.0  # seconds: it can name the rank that is missing


@dataclass(frozen=True)
class _Answer:
    """What each rank tells the others before they are joined."""

    wish: str
    place: Place
    devices: Devices
    notices: tuple[str, ...] = ()
    problem: str | None = None


def start_alone(request: Request):
    """Starts JAX for a process of its own."""
    request.check_ranks(1, 0)
    if request.distributed:
        raise StartupError(
            "distributed=True, but this is a single process. Start several ranks with "
            "`mmrun -n 2 python ...`, or leave distributed= out."
        )
    devices = find_devices(request, 1)
    gpus = None
    if devices.gpus and devices.gpus_per_rank:
        (gpus,) = divide_gpus([devices.gpus], [own_place()], devices.gpus_per_rank)
    _tell(request.notices(), request.debug)
    configure_jax(devices.cpus, gpus, request.collectives)
    if request.collectives:
        coordinator.connect_alone(read_config())


def _tell(notices: Iterable[str], debug: bool):
    """Says what has no meaning of what was asked for, and does what changes messages."""
    for notice in dict.fromkeys(notices):
        logger.warning(notice)
    if debug:
        jax.config.update("jax_traceback_filtering", "off")


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Within this context, SIGINT ends the process: C code that waits hears no KeyboardInterrupt.

    With one rank gone, the others would wait in there until they are killed.
    """
    python = signal.default_int_handler
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is python
    )
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, python)


@_ended_by_interrupts()
def join_ranks(request: Request, launcher: Launcher):
    """Starts JAX on every rank, and joins them."""
    config = read_config()
    # MPI starts only when every rank does. Only mmrun can see from outside which one does not.
    is_watched = wire.notify(wire.Kind.JOINING, {"timeout": config.start_timeout})
    limit = config.start_timeout + (_MMRUN_COMES_FIRST if is_watched else 0)
    answers = _wait_until_every_rank_calls_init(request, launcher, limit)
    communicator = _mpi.communicator()
    _check_agreement(answers)
    rank, places = communicator.Get_rank(), [answer.place for answer in answers]
    notices = [notice for answer in answers for notice in answer.notices]
    _tell(notices if rank == 0 else (), request.debug)
    configure_jax(answers[rank].devices.cpus, _gpus_of_rank(rank, answers), "gloo")
    coordinator.connect_ranks(communicator, places, config)
    stall.monitor().start(
        rank, [place.host for place in places], config.stall_timeout, with_stacks=config.stacks
    )
    ending.end_together(communicator.Dup())


def _wait_until_every_rank_calls_init(request, launcher, limit) -> list[_Answer]:
    """Starts MPI and gathers what each rank was asked for; this process ends after the limit."""
    # MPI keeps the interpreter to itself while it starts: only C code can still end it. All that
    # this code can show is Python's stack, so the name of this function is the message.
    faulthandler.dump_traceback_later(limit, exit=True, file=2)
    try:
        size = _mpi.load().COMM_WORLD.Get_size()
        _check_size(launcher, size)
        return _mpi.communicator().allgather(_answer(request, size))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _check_size(launcher: Launcher, size: int):
    if launcher.size is not None and launcher.size != size:
        hint = (
            "With srun choose the type that the MPI supports: --mpi=pmix for Open MPI, --mpi=pmi2 "
            "for MPICH. Otherwise start with the mpiexec of the MPI that mpi4py loads. mmrun "
            "finds out what is right."
        )
        raise StartupError(
            f"{launcher.name} started {launcher.size} ranks, but MPI on rank {launcher.rank} sees "
            f"{size}: the launcher and the MPI library do not understand each other. {hint}"
        )


def _answer(request, size) -> _Answer:
    devices, problem = Devices(), None
    try:
        request.check_ranks(size, _mpi.communicator().Get_rank())
        devices = find_devices(request, size)
    except StartupError as error:
        problem = str(error)
    return _Answer(request.common(), own_place(), devices, tuple(request.notices()), problem)


def _check_agreement(answers):
    """Raises the same error on every rank, unless all ask for the same and may have it."""
    problems = {rank: answer.problem for rank, answer in enumerate(answers) if answer.problem}
    if problems:
        rank, text = next(iter(problems.items()))
        is_everywhere = set(problems.values()) == {text} and len(problems) == len(answers)
        raise StartupError(text if is_everywhere else f"On rank {rank}: {text}")
    wishes = [_wish(answer) for answer in answers]
    for rank, (text, devices) in enumerate(wishes):
        if wishes[rank] != wishes[0]:
            raise StartupError(
                f"All ranks must ask init for the same. Got {wishes[0][0]} on rank 0, {text} on "
                f"rank {rank} ({wishes[0][1]} and {devices} devices per rank)."
            )


def _wish(answer):
    """What a rank asks for: the arguments of `init`, and the devices that they come to."""
    return answer.wish, answer.devices.cpus or answer.devices.gpus_per_rank


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
