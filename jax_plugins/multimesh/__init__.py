"""multimesh as JAX finds it: a plug-in that adds no platform, and the place of `init`.

JAX imports every package in `jax_plugins` when it starts, and calls its `initialize`. Nothing
heavy is imported here, so that a program without multimesh pays nothing for it.
"""

from multimesh.launch import init

__all__ = ["init", "initialize"]


def initialize():
    """Called by JAX when it starts. The devices are JAX's own, so there is nothing to register."""
