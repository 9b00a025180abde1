"""What a program asks of `init`, checked as far as one process can."""

from dataclasses import dataclass, fields
from typing import Any

from multimesh.config import LONGEST
from multimesh.errors import StartupError

__all__ = ["Request"]

_MEANINGLESS = {
    "coordinator_address": "rank 0 opens the coordinator on a port that is free, and MPI tells the "
    "others",
    "local_device_ids": "the GPUs of a host are divided among its ranks; CUDA_VISIBLE_DEVICES or "
    "`mmrun --devices-per-rank` chooses others",
}


@dataclass(frozen=True)
class Request:
    """The arguments of `init`; see there.

    Attributes:
      cpus: CPU devices in all.
      gpus: GPUs in all.
      collectives: "gloo" or None.
      distributed: Whether there must, or must not, be several ranks.
      coordinator_address: Not used.
      num_processes: How many ranks there must be.
      process_id: Which of them this must be.
      local_device_ids: Not used.
      initialization_timeout: Seconds to wait for the other ranks.
      dump: A folder for programs.
      debug: Whether errors show all there is.
    """

    cpus: int | None = None
    gpus: int | None = None
    collectives: str | None = None
    distributed: bool | None = None
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: Any = None
    initialization_timeout: float | None = None
    dump: str | None = None
    debug: bool = False

    def given(self) -> dict[str, Any]:
        """The arguments that are not left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False)}

    def common(self) -> str:
        """The arguments that must be the same on every rank, as text."""
        return ", ".join(
            f"{name}={value!r}"
            for name, value in (self.given() | {"cpus": self.cpus}).items()
            if name not in ("process_id", "local_device_ids")
        )

    def check(self) -> None:
        """Checks what can be checked without knowing of other ranks.

        Raises:
          StartupError: An argument cannot be used.
        """
        for name in ("cpus", "gpus", "num_processes"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value > 0):
                raise StartupError(f"{name} must be a positive integer or None. Got {value!r}.")
        if self.cpus is not None and self.gpus is not None:
            raise StartupError(
                f"Give cpus= or gpus=. Got both, {self.cpus} and {self.gpus}: a step runs on one "
                "kind of device."
            )
        if self.collectives not in (None, "gloo"):
            raise StartupError(f'collectives must be "gloo" or None. Got {self.collectives!r}.')
        for name, value in (("distributed", self.distributed), ("debug", self.debug)):
            if value is not None and not isinstance(value, bool):
                raise StartupError(f"{name} must be True or False. Got {value!r}.")
        self._check_others()

    def _check_others(self) -> None:
        if self.process_id is not None and not _is_integer(self.process_id):
            raise StartupError(f"process_id must be an integer or None. Got {self.process_id!r}.")
        if not isinstance(self.coordinator_address, str | None):
            raise StartupError(
                "coordinator_address must be a text such as 'host:port', or None. "
                f"Got {self.coordinator_address!r}."
            )
        ids = self.local_device_ids
        if ids is not None and not all(map(_is_integer, ids if isinstance(ids, tuple) else (ids,))):
            raise StartupError(f"local_device_ids must be integers or None. Got {ids!r}.")
        limit = self.initialization_timeout
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 < limit <= LONGEST):
            raise StartupError(
                f"initialization_timeout must be positive seconds, at most {LONGEST}. "
                f"Got {limit!r}."
            )
        is_folder = isinstance(self.dump, str) and self.dump and "\0" not in self.dump
        if self.dump is not None and not is_folder:
            raise StartupError(f"dump must be the name of a folder or None. Got {self.dump!r}.")

    def check_ranks(self, size: int, rank: int) -> None:
        """Checks what the program says of its ranks.

        Args:
          size: How many there are.
          rank: Which this is.

        Raises:
          StartupError: The program says something else.
        """
        if self.distributed is False and size > 1:
            raise StartupError(
                f"distributed=False, but {size} ranks were started. Each would train a model of "
                "its own. Start one process, or leave distributed= out."
            )
        if self.num_processes not in (None, size):
            raise StartupError(
                f"num_processes={self.num_processes}, but {_count(size)} started: the launcher "
                f"says how many there are. Use `mmrun -n {self.num_processes}`, or leave it out."
            )
        if self.process_id not in (None, rank):
            raise StartupError(
                f"process_id={self.process_id}, but this is rank {rank}: the launcher numbers the "
                "ranks. Leave it out."
            )

    def notices(self) -> list[str]:
        """A line for each argument that has no meaning here."""
        return [
            f"init({name}={getattr(self, name)!r}) is ignored: {reason}."
            for name, reason in _MEANINGLESS.items()
            if getattr(self, name) is not None
        ]


def _count(ranks: int) -> str:
    return "1 rank was" if ranks == 1 else f"{ranks} ranks were"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
