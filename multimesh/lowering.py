"""Projects a plan onto a rank: the list of instructions that it runs at every step.

The plan's total order is walked once; each rank keeps what concerns its own devices, so that all
ranks run, send and receive in one order. A *slot* holds an instance of a value on a submesh.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jax.extend import core

from multimesh.plan import Flow, Instance, Plan
from multimesh.schedule import Action

__all__ = ["Instruction", "Op", "RankProgram", "rank_program"]


class Op:
    """The kinds of instruction."""

    RUN = "run"
    POST = "post"
    SEND = "send"
    TAKE = "take"


@dataclass(frozen=True)
class Instruction:
    """One thing that a rank does.

    Attributes:
      op: What kind.
      index: The task (run) or the bundle (post, send, take).
      microbatch: For which microbatch.
      reads: Slots read, in order.
      writes: Slots written, in order.
      frees: Slots that nothing reads afterwards.
    """

    op: str
    index: int
    microbatch: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankProgram:
    """A rank's part of a plan.

    Attributes:
      instructions: What it does, in order.
      slots: Where each instance of a value is kept, by submesh.
      donated: For each task, the inputs that it may overwrite.
    """

    instructions: tuple[Instruction, ...]
    slots: Mapping[tuple[Instance, int], int]
    donated: Mapping[int, frozenset[core.Var]] = field(default_factory=dict)


def rank_program(plan: Plan, rank: int, donate: Iterable[core.Var] = ()) -> RankProgram:
    """Projects a plan onto one rank.

    Args:
      plan: The plan.
      rank: The process.
      donate: Step arguments that the step may overwrite.

    Returns:
      The rank's instructions and slots.
    """
    lowering = _Lowering(plan, rank)
    lowering.emit()
    return RankProgram(
        tuple(lowering.with_frees()), lowering.slots, lowering.donations(frozenset(donate))
    )


class _Lowering:
    def __init__(self, plan: Plan, rank: int):
        self.plan = plan
        self.flow = Flow(plan.cut)
        self.mine = {p.index for p in plan.cut.submeshes if rank in p.processes}
        self.slots: dict[tuple[Instance, int], int] = {}
        self.instructions: list[Instruction] = []
        self.taken: set[tuple[int, int]] = set()
        self.arrival = {
            (Instance(var, microbatch), bundle.target): (index, microbatch)
            for index, bundle in enumerate(plan.bundles)
            for var in bundle.vars
            for microbatch in bundle.microbatches
        }
        self.leaving: defaultdict[int | None, list[int]] = defaultdict(list)
        for index, bundle in enumerate(plan.bundles):
            self.leaving[bundle.task].append(index)

    def slot(self, instance: Instance, submesh: int) -> int:
        return self.slots.setdefault((instance, submesh), len(self.slots))

    def emit(self) -> None:
        """Walks the total order; each action is followed by what it sends."""
        for bundle in self.leaving[None]:
            self.transfer(bundle, 0)
        for action in self.plan.timeline.total_order:
            if self.plan.tasks[action.task].submesh in self.mine:
                self.run(action)
            for bundle in self.leaving[action.task]:
                if action.microbatch in self.plan.bundles[bundle].microbatches:
                    self.transfer(bundle, action.microbatch)
        for instance, submesh in self.flow.results():
            if submesh in self.mine:
                self.take(instance, submesh)
                self.slot(instance, submesh)

    def transfer(self, index: int, microbatch: int) -> None:
        bundle = self.plan.bundles[index]
        if bundle.target in self.mine:
            self.instructions.append(Instruction(Op.POST, index, microbatch))
        if bundle.source in self.mine:
            reads = tuple(
                self.slot(Instance(var, microbatch), bundle.source) for var in bundle.vars
            )
            self.instructions.append(Instruction(Op.SEND, index, microbatch, reads))

    def take(self, instance: Instance, submesh: int) -> None:
        arrival = self.arrival.get((instance, submesh))
        if arrival is None or arrival in self.taken:
            return
        self.taken.add(arrival)
        index, microbatch = arrival
        writes = tuple(
            self.slot(Instance(var, microbatch), submesh) for var in self.plan.bundles[index].vars
        )
        self.instructions.append(Instruction(Op.TAKE, index, microbatch, (), writes))

    def run(self, action: Action) -> None:
        task = self.plan.tasks[action.task]
        inputs = [self.flow.instance(var, action.microbatch) for var in task.inputs]
        for instance in inputs:
            self.take(instance, task.submesh)
        reads = tuple(self.slot(instance, task.submesh) for instance in inputs)
        writes = tuple(
            self.slot(self.flow.instance(var, action.microbatch), task.submesh)
            for var in task.outputs
        )
        self.instructions.append(Instruction(Op.RUN, *action, reads, writes))

    def results(self) -> set[int]:
        """The slots that the caller reads at the end."""
        kept = {
            self.slots[instance, submesh]
            for instance, submesh in self.flow.results()
            if (instance, submesh) in self.slots
        }
        for inner in self.flow.stacked.values():
            for microbatch in range(self.flow.last + 1):
                instance = self.flow.instance(inner, microbatch)
                kept |= {s for (other, _), s in self.slots.items() if other == instance}
        return kept

    def with_frees(self) -> Iterable[Instruction]:
        """Attaches to each instruction the slots that it is the last to touch."""
        seen = self.results()
        reversed_list = []
        for instruction in reversed(self.instructions):
            touched = dict.fromkeys((*instruction.reads, *instruction.writes))
            frees = tuple(slot for slot in touched if slot not in seen)
            seen.update(touched)
            reversed_list.append(replace(instruction, frees=frees))
        return reversed(reversed_list)

    def donations(self, donate: frozenset[core.Var]) -> dict[int, frozenset[core.Var]]:
        """For each task, the inputs that nothing but the task itself ever touches again.

        What is sent or was received is never donated: a message may still be reading it, or its
        memory belongs to the transport.
        """
        shared = self.results()
        shared |= {s for i in self.instructions if i.op != Op.RUN for s in (*i.reads, *i.writes)}
        last: dict[int, int] = {}
        for position, instruction in enumerate(self.instructions):
            last.update(dict.fromkeys(instruction.reads, position))
        by_slot = {slot: key for key, slot in self.slots.items()}
        refused: defaultdict[int, set[core.Var]] = defaultdict(set)
        for position, instruction in enumerate(self.instructions):
            if instruction.op != Op.RUN:
                continue
            task = self.plan.tasks[instruction.index]
            for var, slot in zip(task.inputs, instruction.reads, strict=True):
                owned = by_slot[slot][0].var in self.flow.makers or by_slot[slot][0].var in donate
                once = instruction.reads.count(slot) == 1
                if not owned or not once or slot in shared or last[slot] != position:
                    refused[instruction.index].add(var)
        return {
            index: frozenset(task.inputs) - refused[index]
            for index, task in enumerate(self.plan.tasks)
            if task.submesh in self.mine
        }
