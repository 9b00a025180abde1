"""Cuts a placed step into tasks: the largest pieces that run on one submesh without waiting.

An equation's *level* is the number of changes of submesh or phase on the longest path to it.
Equations of one submesh, phase and level make a task; then tasks are merged as long as that makes
no cycle. A floating equation becomes part of every task that reads it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from multimesh.stages.flat import FlatStep, Node
from multimesh.stages.options import DEFAULTS, Options
from multimesh.stages.placement import Placement

__all__ = ["Need", "Partition", "TaskSpec", "partition"]

SECTIONS = ("before", "loop", "after")


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """A piece of the step that is compiled as one program.

    Attributes:
      name: For plans, traces and errors: F0, B0 (forward and backward on the first submesh), F1B1
        (both at once), P0 (before the loop), U0.0, U0.1 (after it).
      submesh: Index of the submesh that it runs on.
      section: "before", "loop" or "after".
      phase: "forward", "backward", "both", or "once" outside the loop.
      nodes: Its equations, in order, floating ones included.
      inputs: The values that it reads: arguments, slices, carries, results of other tasks.
      outputs: The values that others, the next microbatch or the caller read.
    """

    name: str
    submesh: int
    section: str
    phase: str
    nodes: tuple[Node, ...]
    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]


@dataclass(frozen=True)
class Need:
    """A floating value that a submesh must compute, though none of its equations reads it."""

    var: core.Var
    submesh: int
    section: str


@dataclass(frozen=True)
class Partition:
    """The tasks of a step, each after those of the same microbatch that it waits for."""

    tasks: tuple[TaskSpec, ...]


@dataclass(eq=False)
class _Group:
    """A task in the making.

    Groups of different `part`s must not become one; None goes with any.
    """

    section: str
    submesh: int
    phases: frozenset[str]
    level: int
    part: Any = None
    nodes: list[Node] = field(default_factory=list)
    needs: list[core.Var] = field(default_factory=list)


def partition(
    step: FlatStep, placement: Placement, needs: Iterable[Need], options: Options = DEFAULTS
) -> Partition:
    """Cuts a placed step into tasks.

    Args:
      step: The flat step.
      placement: The submesh of each equation and value.
      needs: Floating values to compute on a submesh besides what its equations read.
      options: Whether registered tasks become one program where they can.

    Returns:
      The tasks, in an order that respects their dependencies.
    """
    cutter = _Cutter(step, placement, options)
    for section in SECTIONS:
        cutter.cut(section, [need for need in needs if need.section == section])
    return Partition(tuple(cutter.specs(list(needs))))


class _Cutter:
    def __init__(self, step: FlatStep, placement: Placement, options: Options):
        self.step = step
        self.options = options
        self.placement = placement
        self.sections = {"before": step.before, "loop": step.loop, "after": step.after}
        everything = [node for section in SECTIONS for node in self.sections[section]]
        self.index = {node: position for position, node in enumerate(everything)}
        self.section_of = {node: section for section in SECTIONS for node in self.sections[section]}
        self.definition = {var: node for node in everything for var in node.outputs}
        labels = [node.label for node in everything if node.label is not None]
        self.fuses_all = options.fusion and options.fusion_outside
        self.fuses_all &= all(label.task.color is None for label in labels)
        self.group_of: dict[Node, _Group] = {}
        self.groups: list[_Group] = []
        self._frontiers: dict[Node, frozenset[Node]] = {}

    def floats(self, node: Node) -> bool:
        return self.placement.nodes[node] is None

    def frontier(self, var: core.Var) -> frozenset[Node]:
        """The placed equations that a value comes from, seen through floating ones."""
        node = self.definition.get(var)
        if node is None:
            return frozenset()
        if not self.floats(node):
            return frozenset((node,))
        if node not in self._frontiers:
            self._frontiers[node] = frozenset().union(*map(self.frontier, node.inputs))
        return self._frontiers[node]

    def cut(self, section: str, needs: list[Need]) -> None:
        """Groups a section's equations by level, then merges the groups."""
        found: dict[tuple, _Group] = {}

        def group(submesh, phase, part, reads) -> _Group:
            sources = [
                self.group_of[source]
                for source in frozenset().union(*map(self.frontier, reads))
                if self.section_of[source] == section
            ]
            here = [other for other in sources if other.submesh == submesh]
            if part is None and here:  # what no task asks for goes on with what it follows
                part = max(here, key=lambda other: other.level).part
            level = 0
            for other in sources:
                apart = other.submesh != submesh or phase not in other.phases
                level = max(level, other.level + (apart or not _fit(other.part, part)))
            key = (submesh, phase, level, part)
            return found.setdefault(key, _Group(section, submesh, frozenset((phase,)), level, part))

        for node in self.sections[section]:
            if not self.floats(node):
                phase, part = self._phase(section, node), self._part(section, node)
                where = group(self.placement.nodes[node], phase, part, node.inputs)
                where.nodes.append(node)
                self.group_of[node] = where
        for need in needs:
            phase = "once" if section != "loop" else "forward"
            group(need.submesh, phase, None, [need.var]).needs.append(need.var)
        self.groups += _Merger(self, list(found.values())).run(self._may_merge(section))

    def _phase(self, section: str, node: Node) -> str:
        if section != "loop":
            return "once"
        if node.scope.backward:
            return "backward"
        values = node.outputs or node.inputs  # an equation may have effects alone
        is_backward = any(var in self.placement.backward for var in values)
        return "backward" if is_backward else "forward"

    def _part(self, section: str, node: Node) -> Any:
        """What keeps the equations of a registered task from becoming one program with others."""
        if node.label is None or self.fuses_all:
            return None
        fuses = self.options.fusion and (self.options.fusion_outside or section == "loop")
        color = node.label.task.color
        return (color,) if fuses else (color, node.label.name, node.label.scope)

    def _may_merge(self, section: str):
        if section == "loop":
            return [
                lambda a, b, after: a.phases == b.phases,
                lambda a, b, after: b in after[a] or a in after[b],
            ]
        # Outside the loop a round of scalars lies between two tasks: merging them would make
        # the readers of the first one wait for what only the second one needs.
        return [lambda a, b, after: after[a] <= {b}]

    def sources(self, group: _Group) -> set[_Group]:
        """The groups of the same section that a group reads from."""
        reads = [var for node in group.nodes for var in node.inputs] + group.needs
        found = {self.group_of[node] for var in reads for node in self.frontier(var)}
        return {other for other in found if other.section == group.section} - {group}

    def specs(self, needs: list[Need]) -> list[TaskSpec]:
        """Builds the tasks, with their floating equations, inputs, outputs and names."""
        ordered = [g for section in SECTIONS for g in self._ordered(section)]
        bodies = [self._body(group) for group in ordered]
        read_by = defaultdict(set)
        for position, nodes in enumerate(bodies):
            for node in nodes:
                for var in node.inputs:
                    read_by[var].add(position)
        wanted = {carry.update for carry in self.step.carries} | set(self.step.outputs)
        wanted |= {carry.initial for carry in self.step.carries}
        wanted |= {entry.inner for entry in self.step.stacked}
        names = _names(ordered)
        specs = []
        for position, (group, nodes) in enumerate(zip(ordered, bodies, strict=True)):
            inside = {var: node for node in nodes for var in node.outputs}
            reads = dict.fromkeys(
                var
                for node in nodes
                for var in node.inputs
                if var not in inside and var not in self.step.constants
            )
            leaves = [
                var
                for var, node in inside.items()
                if not self.floats(node) and (var in wanted or read_by[var] - {position})
            ]
            outputs = dict.fromkeys([*leaves, *group.needs])
            phase = "both" if len(group.phases) > 1 else next(iter(group.phases))
            specs.append(
                TaskSpec(
                    names[position],
                    group.submesh,
                    group.section,
                    phase,
                    tuple(nodes),
                    tuple(reads),
                    tuple(outputs),
                )
            )
        return specs

    def _ordered(self, section: str) -> list[_Group]:
        """A topological order of a section's groups, by level and submesh where it is free."""
        waiting = [group for group in self.groups if group.section == section]
        waiting.sort(key=lambda group: (group.level, group.submesh))
        done: list[_Group] = []
        while waiting:
            ready = next(g for g in waiting if self.sources(g) <= set(done))
            waiting.remove(ready)
            done.append(ready)
        return done

    def _body(self, group: _Group) -> list[Node]:
        """A group's equations with the floating ones that they read."""
        nodes = set(group.nodes)
        pending = [var for node in group.nodes for var in node.inputs] + group.needs
        while pending:
            node = self.definition.get(pending.pop())
            if node is not None and node not in nodes and self.floats(node):
                nodes.add(node)
                pending.extend(node.inputs)
        return sorted(nodes, key=self.index.__getitem__)


class _Merger:
    """Merges groups of one submesh while the graph of groups stays without cycles."""

    def __init__(self, cutter: _Cutter, groups: list[_Group]):
        self.cutter = cutter
        self.groups = sorted(groups, key=lambda group: (group.level, group.submesh))

    def run(self, rules) -> list[_Group]:
        for rule in rules:
            while pair := self._pair(rule):
                self._merge(*pair)
        return self.groups

    def _pair(self, rule):
        after = self._successors()
        reach = _reachable(after)
        for position, first in enumerate(self.groups):
            for second in self.groups[position + 1 :]:
                if first.submesh != second.submesh or not rule(first, second, after):
                    continue
                if not _fit(first.part, second.part):
                    continue
                if not _through_third(first, second, after, reach) and not _through_third(
                    second, first, after, reach
                ):
                    return first, second
        return None

    def _successors(self) -> dict[_Group, set[_Group]]:
        after: dict[_Group, set[_Group]] = {group: set() for group in self.groups}
        for group in self.groups:
            for source in self.cutter.sources(group):
                after[source].add(group)
        return after

    def _merge(self, first: _Group, second: _Group) -> None:
        first.phases |= second.phases
        first.level = max(first.level, second.level)
        first.part = second.part if first.part is None else first.part
        first.nodes += second.nodes
        first.needs += second.needs
        for node in second.nodes:
            self.cutter.group_of[node] = first
        self.groups.remove(second)


def _fit(first: Any, second: Any) -> bool:
    """Whether groups of two parts may be one."""
    return first == second or None in (first, second)


def _reachable(after) -> dict[_Group, set[_Group]]:
    reach: dict[_Group, set[_Group]] = {}

    def visit(group):
        if group not in reach:
            reach[group] = set()
            for follower in after[group]:
                reach[group] |= {follower} | visit(follower)
        return reach[group]

    for group in after:
        visit(group)
    return reach


def _through_third(first, second, after, reach) -> bool:
    """Whether a path from `first` to `second` passes through another group."""
    return any(second in reach[third] for third in after[first] if third is not second)


_LETTERS = {
    ("before", frozenset(("once",))): "P{0}",
    ("loop", frozenset(("forward",))): "F{0}",
    ("loop", frozenset(("backward",))): "B{0}",
    ("loop", frozenset(("forward", "backward"))): "F{0}B{0}",
    ("after", frozenset(("once",))): "U{0}",
}


def _names(groups: list[_Group]) -> list[str]:
    """Names groups by submesh, numbering several of one kind."""
    plain = [_LETTERS[group.section, group.phases].format(group.submesh) for group in groups]
    seen: defaultdict[str, int] = defaultdict(int)
    names = []
    for name in plain:
        several = plain.count(name) > 1 or name.startswith("U")
        names.append(f"{name}.{seen[name]}" if several else name)
        seen[name] += 1
    return names
