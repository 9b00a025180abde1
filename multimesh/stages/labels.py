"""The task of each scope of one step: what the registry says, and which patterns it used."""

import logging

from jax.extend import core
from jax.sharding import Mesh

from multimesh._compat import equation_scope_text, jaxprs_in_params
from multimesh.errors import RegistryError
from multimesh.stages.meshes import mesh_positions
from multimesh.stages.registry import Entry, Label, Registry
from multimesh.stages.scopes import LOOP_SCOPE, Scope, parse_scope
from multimesh.stages.tasks import Task

__all__ = ["Labels"]

logger = logging.getLogger("multimesh")


class Labels:
    """Looks scopes up in a registry, and remembers which it saw and which patterns matched."""

    def __init__(
        self, registry: Registry, mesh: Mesh, closed: core.ClosedJaxpr, ignore: bool = False
    ):
        """Prepares to label one step.

        Args:
          registry: The registered tasks.
          mesh: All devices of the step: where nothing has a task, it is one task on them.
          closed: The traced step.
          ignore: Whether it is one task whatever is registered.
        """
        self.registry = registry
        self.matched: set[Entry] = set()
        self.scopes: dict[str, None] = {}
        self.known: dict[Scope, Label | None] = {}
        has_tasks = not ignore and (
            registry.entries
            or (registry.explicit.keys() and _names(closed.jaxpr) & registry.explicit.keys())
        )
        self.everything = None if has_tasks else Label("all", Task(mesh_positions(mesh)))

    def __call__(self, scope: Scope) -> Label | None:
        """The task of a scope, if it has one."""
        if self.everything is not None:
            return self.everything
        if scope not in self.known:
            if LOOP_SCOPE not in scope.path:
                self.scopes["/".join(scope.path)] = None
            found = self.registry.label(scope.path, scope.backward)
            self.known[scope] = found[0] if found else None
            if found and found[1]:
                self.matched.add(found[1])
        return self.known[scope]

    def check_any(self) -> None:
        """Checks that some task was found, and warns of patterns that have not matched.

        Raises:
          RegistryError: None was.
        """
        if not any(self.known.values()):
            self.check_patterns()
        missing = [e.pattern for e in self.registry.entries if e not in self.matched]
        if missing and self.everything is None:
            logger.warning("register_task: no scope of this function matches %s.", missing)

    def check_patterns(self) -> None:
        """Checks that every registered pattern has matched.

        Raises:
          RegistryError: One has not; the message names the scopes that exist.
        """
        if self.everything is not None:
            return
        missing = [e.pattern for e in self.registry.entries if e not in self.matched]
        if missing:
            scopes = ", ".join(sorted(filter(None, self.scopes)))
            scopes = scopes or "none; does the loss use the model?"
            raise RegistryError(
                f"The pattern{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))} of "
                f"register_task match{'es' * (len(missing) == 1)} no module of the model. The "
                f"scopes that exist: {scopes}. A pattern must match one component fully, or with "
                "slashes the end of a path; clear_tasks() forgets tasks of another model."
            )


def _names(jaxpr: core.Jaxpr) -> set[str]:
    """Every component of every scope in a program."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        found.update(parse_scope(equation_scope_text(eqn)).path)
        for body in jaxprs_in_params(eqn.params):
            found |= _names(body)
    return found
