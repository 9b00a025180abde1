"""Runs a rank's instructions: compiled tasks, sends and receives, in the planned order.

Only arrays move here. Everything that can be decided before the first step (which executable,
which channel, which slots) is bound into closures when the executor is made.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from multimesh.launch.activity import activity
from multimesh.lowering import Instruction, Op, RankProgram
from multimesh.plan import Plan
from multimesh.stages.program import Program
from multimesh.transport import Channel, Transport

__all__ = ["Executor"]

Store = list[Any]


class Executor:
    """A rank's program, ready to run."""

    def __init__(
        self,
        plan: Plan,
        program: RankProgram,
        compiled: Mapping[tuple[int, int], Program],
        channels: Mapping[tuple[int, int], Channel],
        transport: Transport,
    ):
        """Binds instructions to executables and channels.

        Args:
          plan: What is run, for messages.
          program: The rank's instructions.
          compiled: The compiled tasks of this rank, by task index and variant of the plan.
          channels: The channels, by bundle index and variant of the plan.
          transport: What the channels belong to.
        """
        self.plan = plan
        self.size = len(program.slots)
        self.instructions = program.instructions
        self.transport = transport
        self.compiled = compiled
        self.channels = channels
        self.activity = activity()
        self.bound = [self._bind(instruction) for instruction in program.instructions]

    def run(self, store: Store) -> None:
        """Runs one step.

        Args:
          store: One entry for each slot; those of arguments are filled, those of results are
            filled when this returns.

        Raises:
          StallError: Another rank did not send in time, or has ended.
        """
        activity = self.activity
        with activity.step(self._text):
            for number, action in enumerate(self.bound):
                activity.instruction = number
                action(store)
            activity.instruction = len(self.bound)
            self.transport.flush()

    def measure(self, store: Store) -> dict[int, list[float]]:
        """Runs one step, waiting for each task to end before the next begins.

        Args:
          store: As for `run`.

        Returns:
          The seconds of every run of each local task, by task index.
        """
        seconds: dict[int, list[float]] = {}
        with self.activity.step(self._text):
            for number, action in enumerate(self.bound):
                self.activity.instruction = number
                instruction = self.instructions[number]
                jax.block_until_ready([store[slot] for slot in instruction.reads])
                start = time.perf_counter()
                action(store)
                if instruction.op == Op.RUN:
                    kept = [store[slot] for slot in instruction.writes]
                    jax.block_until_ready([value for value in kept if value is not None])
                    seconds.setdefault(instruction.index, []).append(time.perf_counter() - start)
            self.activity.instruction = len(self.bound)
            self.transport.flush()
        return seconds

    def _text(self, number: int) -> str:
        if number == len(self.instructions):
            return "its last messages"
        instruction = self.instructions[number]
        where = (
            self.plan.tasks[instruction.index].name
            if instruction.op == Op.RUN
            else self.plan.bundles[instruction.index].name
        )
        return f"{instruction.op} {where}, microbatch {instruction.microbatch}"

    def _bind(self, instruction: Instruction) -> Callable[[Store], None]:
        key = instruction.index, self.plan.variant_of(instruction.microbatch)
        if instruction.op == Op.RUN:
            return _run(self.compiled[key].call, instruction)
        channel = self.channels[key]
        bind = {Op.POST: _post, Op.SEND: _send, Op.TAKE: _take}[instruction.op]
        return bind(channel, instruction)


def _run(call: Callable[..., list[jax.Array]], instruction: Instruction):
    reads, writes, frees = instruction.reads, instruction.writes, instruction.frees

    def run(store: Store) -> None:
        results = call(*[store[slot] for slot in reads])
        for slot, value in zip(writes, results, strict=True):
            store[slot] = value
        for slot in frees:
            store[slot] = None

    return run


def _post(channel: Channel, instruction: Instruction):
    microbatch = instruction.microbatch

    def post(store: Store) -> None:
        channel.post(microbatch)

    return post


def _send(channel: Channel, instruction: Instruction):
    microbatch, reads, frees = instruction.microbatch, instruction.reads, instruction.frees

    def send(store: Store) -> None:
        channel.send(microbatch, [store[slot] for slot in reads])
        for slot in frees:
            store[slot] = None

    return send


def _take(channel: Channel, instruction: Instruction):
    microbatch, writes, frees = instruction.microbatch, instruction.writes, instruction.frees

    def take(store: Store) -> None:
        for slot, value in zip(writes, channel.take(microbatch), strict=True):
            store[slot] = value
        for slot in frees:
            store[slot] = None

    return take
