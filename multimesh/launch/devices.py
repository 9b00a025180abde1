"""Which devices each rank has: CPU devices in equal parts, or GPUs of its host."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from multimesh import _compat
from multimesh.config import read_config
from multimesh.errors import StartupError
from multimesh.launch.gpus import VisibleGpus, count_gpus, find_gpus, jax_can_use_gpus
from multimesh.launch.request import Request

__all__ = ["Devices", "configure_jax", "find_devices"]


@dataclass(frozen=True)
class Devices:
    """What a rank may use.

    Attributes:
      cpus: CPU devices of each rank, or None for the devices that JAX finds.
      gpus: With None for `cpus`, the GPUs that this process sees, if JAX would use them.
      gpus_per_rank: How many of them each rank was asked to use, or None.
    """

    cpus: int | None = None
    gpus: VisibleGpus | None = None
    gpus_per_rank: int | None = None


def find_devices(request: Request, size: int) -> Devices:
    """Divides the devices among the ranks, if it is not too late to ask for any.

    Args:
      request: How many devices in all, or none for those that JAX finds.
      size: Number of ranks.

    Raises:
      StartupError: JAX has already started, or the devices cannot be divided.
    """
    if _compat.backends_have_started():
        raise StartupError(
            "multimesh.init was called after JAX had started. Call it at the top of the program: "
            "before jax.devices(), before arrays are made, before anything is jitted."
        )
    override = read_config().devices_per_rank
    if request.cpus is not None:
        return Devices(cpus=override or _share("cpus", request.cpus, size))
    gpus = _visible_gpus()
    if request.gpus is not None:
        if gpus is None:
            raise StartupError(
                f"gpus={request.gpus}, but JAX would use no GPU here: there is none, or JAX's CUDA "
                "plug-in is not installed, or JAX_PLATFORMS excludes it. Use cpus=."
            )
        return Devices(gpus=gpus, gpus_per_rank=override or _share("gpus", request.gpus, size))
    return Devices(gpus=gpus, gpus_per_rank=override) if gpus else Devices(cpus=override)


def _share(name: str, count: int, size: int) -> int:
    """The devices of each rank."""
    if count % size:
        raise StartupError(
            f"{name} must be a multiple of the number of ranks. Got {name}={count} and {size} "
            f"ranks. Use {name}={max(1, count // size) * size}, or another number of ranks."
        )
    return count // size


def _visible_gpus() -> VisibleGpus | None:
    """The GPUs that JAX would use in this process, or None."""
    if not jax_can_use_gpus(jax.config.jax_platforms):
        return None
    gpus = find_gpus(os.environ, count_gpus())
    return gpus if gpus.names else None


def configure_jax(cpus: int | None, gpus: Sequence[int] | None, collectives: str | None):
    """Has JAX start with these devices.

    Args:
      cpus: Number of CPU devices, or None for the devices that JAX finds.
      gpus: The GPUs, as indices among those that this process sees, or None for all.
      collectives: What carries collectives between CPU devices, or None for JAX's default.
    """
    if cpus is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpus)
    if gpus is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus)))
    if collectives:
        jax.config.update("jax_cpu_collectives_implementation", collectives)
