"""Assembles what a step returns from the slots that its instructions filled."""

from collections.abc import Mapping

from multimesh.plan import Flow, Instance, Plan
from multimesh.state import State, assemble, without_shards

__all__ = ["Results"]


class Results:
    """Knows where each result of a step is found on this rank.

    A result is one of: a state leaf as it came; a value on its submesh (or, on another rank, an
    array without shards); a small value on every submesh, assembled to a replicated array; or, for
    a value of each microbatch, a list of arrays.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Mapping[tuple[Instance, int], int],
        first_state: int,
        state: State,
    ):
        """Finds the slots of the results.

        Args:
          plan: The plan.
          slots: The rank's slots.
          first_state: How many results come before the new state.
          state: The state, for shardings and to remember replicated leaves.
        """
        self.plan = plan
        self.flow = Flow(plan.cut)
        self.slots = slots
        self.first_state = first_state
        self.state = state
        self.readers = [self._reader(index, var) for index, var in enumerate(plan.cut.step.outputs)]

    def collect(self, store: list, leaves: list) -> tuple[list, list]:
        """Returns the results and the new state's leaves."""
        values = [read(store, leaves) for read in self.readers]
        return values[: self.first_state], values[self.first_state :]

    def _reader(self, index: int, var):
        cut = self.plan.cut
        if var in self.flow.stacked:
            return self._stacked(self.flow.stacked[var])
        if var in cut.homes:
            argument = cut.step.arguments.index(var)
            return lambda store, leaves: leaves[argument]
        home = cut.results[var]
        instance = self.flow.instance(var, self.flow.last)
        if home is not None:
            return self._placed(var, instance, home)
        return self._replicated(index, instance)

    def _placed(self, var, instance: Instance, home: int):
        slot = self.slots.get((instance, home))
        if slot is None:
            sharding = self.plan.cut.shardings.of(var, home)
            absent = without_shards(var.aval.shape, var.aval.dtype, sharding)
            return lambda store, leaves: absent
        return lambda store, leaves: store[slot]

    def _replicated(self, index: int, instance: Instance):
        used = {submesh: self.slots[instance, submesh] for submesh in self.state.mine}
        if not used:  # no device of the step is this rank's
            aval = instance.var.aval
            absent = without_shards(aval.shape, aval.dtype, self.state.everywhere)
            return lambda store, leaves: absent
        leaf_index = index - self.first_state
        state = self.state

        def read(store, leaves):
            parts = {submesh: store[slot] for submesh, slot in used.items()}
            whole = assemble(parts, state.everywhere)
            if leaf_index >= 0:
                state.copies[leaf_index] = (whole, parts)
            return whole

        return read

    def _stacked(self, inner):
        found = []
        for microbatch in range(self.flow.last + 1):
            instance = self.flow.instance(inner, microbatch)
            submesh = min(self.flow.places(instance.var))
            slot = self.slots.get((instance, submesh))
            absent = None
            if slot is None:
                variant = self.plan.variants[self.plan.variant_of(microbatch)]
                var = variant.twins.get(instance.var, instance.var)
                sharding = variant.cut.shardings.of(var, submesh)
                absent = without_shards(var.aval.shape, var.aval.dtype, sharding)
            found.append((slot, absent))
        return lambda store, leaves: [
            absent if slot is None else store[slot] for slot, absent in found
        ]
