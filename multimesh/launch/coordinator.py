"""Brings up jax.distributed over the ranks of this job, and of no other.

JAX's own detection of launchers is wrong for most of them, so everything is passed explicitly.
A coordinator's port is never fixed: two jobs on one port do not fail, gRPC mixes them.
"""

import os
import secrets
import socket
import time

import jax

from multimesh import _compat
from multimesh.errors import StartupError

__all__ = ["connect_alone", "connect_ranks"]

_NONCE_KEY = "multimesh/nonce"
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.01


def connect_ranks(communicator, timeout: float):
    """Starts jax.distributed on every rank, with rank 0 as its coordinator.

    Args:
      communicator: The job's private communicator.
      timeout: Seconds to wait for the other ranks.

    Raises:
      StartupError: The coordinator cannot be reached, or belongs to another job.
    """
    rank, size = communicator.Get_rank(), communicator.Get_size()
    hosts = communicator.allgather(socket.gethostname())
    with _reserve_port(_own_address(hosts)) as reservation:
        proposal = (reservation.getsockname(), secrets.token_hex(16))
        address, nonce = communicator.bcast(proposal, root=0)
        if rank > 0:
            # Other ranks need no port; and JAX itself would retry only every second.
            reservation.close()
            _wait_for_listener(address, timeout)
        _initialize(address, size, rank, timeout)
    _check_nonce(nonce, rank, address, timeout)
    if jax.process_count() != size:
        raise StartupError(
            f"JAX sees {jax.process_count()} processes on rank {rank}; MPI started {size}. "
            "Do not call jax.distributed.initialize beside multimesh.init."
        )


def connect_alone(timeout: float):
    """Starts jax.distributed for this process alone, which gloo needs.

    Args:
      timeout: Seconds to wait for the coordinator of this process.
    """
    with _reserve_port(_LOOPBACK) as reservation:
        _initialize(reservation.getsockname(), 1, 0, timeout)


def _initialize(address, size, rank, timeout):
    host, port = address
    _exempt_from_proxy(host)
    jax.distributed.initialize(
        coordinator_address=f"{host}:{port}",
        num_processes=size,
        process_id=rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"{host}:{port}",
        initialization_timeout=max(1, int(timeout)),
    )


def _own_address(hosts):
    """The address at which the others reach this host."""
    if len(set(hosts)) == 1:
        return _LOOPBACK
    # Never a look-up of the own name, which is often a loopback address. Connecting a UDP socket
    # sends nothing; it chooses the route out of this host, and so the address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]


def _reserve_port(host):
    """Binds a free port, which nobody else then gets, without listening on it.

    The coordinator binds the same port next: gRPC sets SO_REUSEPORT as well.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((host, 0))
    return reservation


def _wait_for_listener(address, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(address, timeout=timeout).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise StartupError(
                    f"The coordinator of rank 0 at {address[0]}:{address[1]} cannot be reached "
                    f"within {timeout:g} s: {exc}. Check that no firewall is between the hosts."
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


def _check_nonce(nonce, rank, address, timeout):
    store = _compat.coordination_store()
    if rank == 0:
        store.key_value_set(_NONCE_KEY, nonce)
    found = store.blocking_key_value_get(_NONCE_KEY, int(timeout * 1000))
    if found != nonce:
        raise StartupError(
            f"The coordinator at {address[0]}:{address[1]} belongs to another job. Start again; "
            "every start takes a new port."
        )
