"""The only file that touches what JAX does not promise to keep: one small function for each need."""

from typing import Any

from jax.extend import core

__all__ = ["equation_scope_text", "new_jaxpr", "new_variable"]


def new_variable(aval) -> core.Var:
    """Returns a fresh variable. `core.Var` is public; its arguments differ between releases."""
    return core.Var(aval)


def equation_scope_text(eqn: core.JaxprEqn) -> str:
    """Returns the name stack of an equation. `source_info` is public by name only."""
    return str(eqn.source_info.name_stack)


def new_jaxpr(constvars, invars, outvars, eqns, name: str) -> core.Jaxpr:
    """Builds a jaxpr from equations; the form of `debug_info` is not stable."""
    effects: Any = core.no_effects.union(*(eqn.effects for eqn in eqns))
    info = core.DebugInfo(
        "jit", name, tuple(f"x{i}" for i in range(len(invars))), ("",) * len(outvars)
    )
    return core.Jaxpr(constvars, invars, outvars, eqns, effects, info)
