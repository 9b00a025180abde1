"""Brings up jax.distributed over the ranks of this job, and of no other.

JAX's own detection of launchers is wrong for most of them, so everything is passed explicitly.
A coordinator's port is never fixed: two jobs on one port do not fail, gRPC mixes them.
"""

import os
import secrets
import socket
import time
from collections.abc import Sequence

import jax

from multimesh import _compat
from multimesh.config import Config
from multimesh.errors import StartupError
from multimesh.launch import preemption
from multimesh.launch.addresses import LOOPBACK
from multimesh.launch.places import Place, check_routes, meeting_address

__all__ = ["connect_alone", "connect_ranks"]

_NONCE_KEY = "multimesh/nonce"
_ATTEMPTS = 3
_POLL_SECONDS = 0.01


def connect_ranks(communicator, places: Sequence[Place], config: Config):
    """Starts jax.distributed on every rank, with rank 0 as its coordinator.

    Args:
      communicator: The job's private communicator.
      places: The place of each rank.
      config: How long to wait for the other ranks, now and later.

    Raises:
      StartupError: Hosts cannot reach each other, or the coordinator keeps belonging to another
        job.
    """
    rank, size = communicator.Get_rank(), communicator.Get_size()
    own_address = _own_address(communicator, places)
    if len(set(places)) > 1:
        check_routes(communicator, places, own_address)
    _compat.have_gloo_meet_at(own_address)
    for _ in range(_ATTEMPTS):
        with _reserve_port(own_address) as reservation:
            proposal = (reservation.getsockname()[:2], secrets.token_hex(16))
            address, nonce = communicator.bcast(proposal, root=0)
            if rank > 0:
                # Other ranks need no port; and JAX itself would retry only every second.
                reservation.close()
                _wait_for_listener(address, places[0], config.start_timeout)
            _initialize(address, size, rank, config)
        if all(communicator.allgather(_has_nonce(nonce, rank, config.start_timeout))):
            break
        # Some ranks met another job's coordinator, which took the port over.
        jax.distributed.shutdown()
    else:
        raise StartupError(
            f"The coordinator at {address[0]}:{address[1]} belongs to another job, as those on "
            f"{_ATTEMPTS - 1} ports before it. Start again, with fewer jobs on {places[0].host}."
        )
    if jax.process_count() != size:
        raise StartupError(
            f"JAX sees {jax.process_count()} processes on rank {rank}; MPI started {size}. "
            "Do not call jax.distributed.initialize beside multimesh.init."
        )


def connect_alone(config: Config):
    """Starts jax.distributed for this process alone, which gloo needs.

    Args:
      config: How long to wait for the coordinator of this process.
    """
    _compat.have_gloo_meet_at(LOOPBACK)
    with _reserve_port(LOOPBACK) as reservation:
        _initialize(reservation.getsockname(), 1, 0, config)


def _own_address(communicator, places):
    """The address of this rank's host, or the same error on every rank."""
    address = problem = None
    try:
        address = meeting_address(places[communicator.Get_rank()], places)
    except StartupError as error:
        problem = str(error)
    problems = list(filter(None, communicator.allgather(problem)))
    if problems:
        raise StartupError(problems[0])
    return address


def _initialize(address, size, rank, config):
    host, port = address
    _exempt_from_proxy(host)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    jax.distributed.initialize(
        coordinator_address=place,
        num_processes=size,
        process_id=rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=place,
        initialization_timeout=max(1, int(config.start_timeout)),
        # A rank that is silent for long is to be named by our own report, not killed by JAX.
        heartbeat_timeout_seconds=max(100, int(2 * config.stall_timeout)),
    )
    preemption.release_sigterm()


def _reserve_port(host):
    """Binds a free port, which nobody else then gets, without listening on it.

    The coordinator binds the same port next: gRPC sets SO_REUSEPORT as well.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((host, 0))
    return reservation


def _wait_for_listener(address, place, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(address, timeout=timeout).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise StartupError(
                    f"The coordinator of rank 0 on {place.host}, at {address[0]}:{address[1]}, "
                    f"cannot be reached within {timeout:g} s from {socket.gethostname()}: {exc}."
                ) from exc
        time.sleep(_POLL_SECONDS)


def _exempt_from_proxy(host):
    """Keeps gRPC from sending the traffic between ranks to a proxy of the environment."""
    # JAX warns that a proxy may make ranks wait for ever; not these.
    jax.config.update("jax_check_proxy_envs", False)
    if not {"http_proxy", "https_proxy", "grpc_proxy"} & os.environ.keys():
        return
    name = "no_grpc_proxy"  # gRPC reads only the small letters
    exempt = os.environ.get(name) or os.environ.get("no_proxy")
    os.environ[name] = f"{exempt},{host}" if exempt else host


def _has_nonce(nonce, rank, timeout):
    """Whether the coordinator that this rank is connected to is the one of its job."""
    store = _compat.coordination_store()
    if rank == 0:
        store.key_value_set(_NONCE_KEY, nonce)
    return store.blocking_key_value_get(_NONCE_KEY, int(timeout * 1000)) == nonce
