"""The only file that touches what JAX does not promise to keep: one small function per need."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax._src import core as internal_core
from jax.extend import core

__all__ = [
    "backends_have_started",
    "coordination_store",
    "equation_scope_text",
    "have_gloo_meet_at",
    "jaxprs_in_params",
    "new_jaxpr",
    "new_variable",
    "unknown_axis",
    "without_mesh",
]


def backends_have_started() -> bool:
    """Whether JAX has looked for devices. Every public question would make it do so."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def coordination_store():
    """The key-value store of jax.distributed, which JAX uses itself but does not export."""
    from jax._src import distributed

    return distributed.global_state.client


def have_gloo_meet_at(address: str):
    """Makes gloo, which carries collectives between CPU devices, listen at an address.

    JAX's own choice is what this host's name resolves to: often a loopback address, which no
    other host can connect to. JAX has no setting for it, only this way to make the CPU devices.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    def make_client():
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def new_variable(aval) -> core.Var:
    """Returns a fresh variable. `core.Var` is public; its arguments differ between releases."""
    return core.Var(aval)


def equation_scope_text(eqn: core.JaxprEqn) -> str:
    """Returns the name stack of an equation. `source_info` is public by name only."""
    return str(eqn.source_info.name_stack)


def new_jaxpr(constvars, invars, outvars, eqns, name: str) -> core.Jaxpr:
    """Builds a jaxpr from equations; the form of `debug_info` is not stable."""
    effects: Any = frozenset().union(*(eqn.effects for eqn in eqns))
    info = internal_core.DebugInfo(
        "jit", name, tuple(f"x{i}" for i in range(len(invars))), ("",) * len(outvars)
    )
    return core.Jaxpr(constvars, invars, outvars, eqns, effects, info)


def jaxprs_in_params(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """Yields the programs in an equation's parameters. In `jax.extend.core` from JAX 0.10 on."""
    for value in params.values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def unknown_axis(error: ValueError) -> str | None:
    """Returns the axis that a sharding constraint names and the mesh lacks.

    JAX has no exception type of its own for this; the wording is the only sign.
    """
    found = re.search(r"Resource axis: (\S+) of .* is not found in mesh", str(error))
    return found.group(1) if found else None


def without_mesh(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Returns an equation that no longer remembers the abstract mesh it was traced under.

    The body of a loop enters the mesh that its equations remember, which has other sizes than the
    task's; and a literal that is an array remembers it too. A new equation remembers the present
    context; call this outside of any mesh. A literal may also be a Python number with the dtype of
    its aval, which NumPy would widen.
    """
    present = internal_core.new_jaxpr_eqn([], [], eqn.primitive, {}, eqn.effects)
    invars = [
        core.Literal(np.asarray(atom.val, atom.aval.dtype), atom.aval)
        if isinstance(atom, core.Literal) and hasattr(atom.val, "dtype")
        else atom
        for atom in eqn.invars
    ]
    return eqn.replace(ctx=present.ctx, invars=invars)
