"""Which results of a traced function are arguments, as they came.

A `jit` or a checkpoint inside returns what it only passes on under a new name:

    a = jit[{ lambda x w .  y = dot x w;  return y, w }] x w        # `w` again: argument 1
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from multimesh._compat import jaxprs_in_params

__all__ = ["forwarded"]


def forwarded(function: Callable, args: Sequence[Any]) -> list[int | None]:
    """Traces a function and finds its results among its arguments.

    Args:
      function: Takes `args`; returns a pytree.
      args: Pytrees of arrays or their shapes.

    Returns:
      For each leaf of the result, which leaf of the arguments it is, or None.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [_argument(jaxpr, atom) for atom in jaxpr.outvars]


_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}


def _argument(jaxpr: core.Jaxpr, atom: Any) -> int | None:
    definition = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    while atom not in jaxpr.invars:
        eqn = definition.get(atom) if isinstance(atom, core.Var) else None
        if eqn is None or eqn.primitive.name not in _CALLS:
            return None
        (body,) = jaxprs_in_params(eqn.params)
        inner = _argument(body, body.outvars[eqn.outvars.index(atom)])
        if inner is None:
            return None
        atom = eqn.invars[inner]
    return jaxpr.invars.index(atom)
