"""Every exception that multimesh raises on purpose.

    MultimeshError
    ├── StartupError          the ranks could not be brought up
    ├── RankMismatchError     the ranks were given different programs or data
    ├── SaveError             a checkpoint could not be written
    ├── RestoreError          a checkpoint is damaged
    ├── StallError            a wait for another rank took longer than the timeout
    └── UsageError            an argument, model or batch cannot be used as given
        ├── RegistryError     the registered tasks contradict each other, the model or the devices
        ├── BatchError        a batch does not have the promised structure, shape or dtype
        ├── PlacementError    the traced step cannot be cut into tasks
        └── ScheduleError     tasks or a schedule that cannot be run to the end

`UsageError` is also a `ValueError`, `SaveError` and `RestoreError` an `OSError`, `StallError`
a `TimeoutError`, so that generic handlers catch them. A message says what was got, what was
expected, and what to do.
"""

__all__ = [
    "BatchError",
    "MultimeshError",
    "PlacementError",
    "RankMismatchError",
    "RegistryError",
    "RestoreError",
    "SaveError",
    "ScheduleError",
    "StallError",
    "StartupError",
    "UsageError",
]


class MultimeshError(Exception):
    """The base of all exceptions of this package."""


class StartupError(MultimeshError, RuntimeError):
    """The ranks could not be brought up."""


class RankMismatchError(MultimeshError, RuntimeError):
    """The ranks were given different programs or data; the same error is raised on every rank."""


class SaveError(MultimeshError, OSError):
    """A checkpoint could not be written; the same error is raised on every rank."""


class RestoreError(MultimeshError, OSError):
    """A checkpoint is damaged; the same error is raised on every rank."""


class StallError(MultimeshError, TimeoutError):
    """A wait for another rank took longer than the timeout, or cannot end any more.

    Attributes:
      culprit: The rank that everything waits for, or None where that is no single one.
    """

    culprit: int | None = None


class UsageError(MultimeshError, ValueError):
    """An argument, a model or a batch cannot be used as given."""


class RegistryError(UsageError):
    """The registered tasks contradict each other, the model or the devices."""


class BatchError(UsageError):
    """A batch does not have the promised tree, shapes or dtypes."""


class PlacementError(UsageError):
    """The traced step cannot be cut into tasks."""


class ScheduleError(UsageError):
    """Tasks, or an order of them, that cannot be run to the end."""
