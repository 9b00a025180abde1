"""coverage.py in the ranks: measured as the outer process is, and added to its data."""

import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["collect", "save", "settings", "start"]

_OPTIONS = (
    "run:branch",
    "run:concurrency",
    "run:include",
    "run:omit",
    "run:plugins",
    "run:relative_files",
    "run:source",
    "run:source_pkgs",
)


def settings() -> dict | None:
    """How this process is measured, by `coverage run` or pytest-cov.

    Returns:
      What `start` takes, or None if it is not measured.
    """
    measuring = _current()
    if measuring is None:
        return None
    options = {name: measuring.get_option(name) for name in _OPTIONS}
    return {"config_file": measuring.config.config_file or False, "options": options}


def start(how: dict, data_file: str):
    """Starts to measure this process.

    Args:
      how: What `settings` returned in the outer process.
      data_file: Where the data go.

    Returns:
      What `save` takes; None if the environment has already started a measurement of its own.
    """
    import coverage

    if _current() is not None:
        return None
    measuring = coverage.Coverage(data_file=data_file, config_file=how["config_file"])
    for name, value in how["options"].items():
        measuring.set_option(name, value)
    measuring.set_option("run:parallel", False)
    measuring.start()
    return measuring


def save(measuring):
    """Ends what `start` began."""
    if measuring is not None:
        measuring.stop()
        measuring.save()


def collect(data_files: Iterable[str]):
    """Adds what ranks have measured to the data of this process."""
    measuring = _current()
    if measuring is None:
        return
    import coverage

    for path in filter(lambda path: Path(path).exists(), data_files):
        data = coverage.CoverageData(path)
        data.read()
        measuring.get_data().update(data)


def _current():
    # Not imported: only what runs already can measure this process.
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None
