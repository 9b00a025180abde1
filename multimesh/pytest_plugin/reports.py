"""The reports of several ranks about one test, as the one report that is shown."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = [
    "Failures",
    "from_json",
    "has_raised",
    "lost",
    "merge",
    "passed_teardown",
    "to_json",
]


def to_json(config, report) -> str:
    """A report of this process as one line of text."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return json.dumps(data, default=repr)


def from_json(config, line: str) -> pytest.TestReport:
    """The report again, on another rank or outside the job."""
    report: Any = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
    # pytest and its plugins expect tuples where JSON knows lists only.
    report.sections = [tuple(section) for section in report.sections]
    if isinstance(report.longrepr, list):
        report.longrepr = tuple(report.longrepr)
    report.location = tuple(report.location)
    report.user_properties = [tuple(pair) for pair in report.user_properties]
    return report


def has_raised(report) -> bool:
    """Whether the test ended with an exception, expected ones (xfail) included."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail"))


def merge(reports: Mapping[int, pytest.TestReport], places: Sequence[str]) -> pytest.TestReport:
    """One report for a phase of a test: failed if it failed on any rank.

    Args:
      reports: Rank -> its report of this phase; some ranks may have none.
      places: For each rank, how to call it.

    Returns:
      A report with the tracebacks of all ranks that failed, and the captured output of all.
    """
    ranks = sorted(reports)
    first: Any = reports[min(ranks, key=lambda rank: (_weight(reports[rank]), rank))]
    if first.failed and len(places) > 1:
        first.longrepr = _failures(
            {places[r]: reports[r] for r in ranks if reports[r].failed}, len(places)
        )
    if len(places) > 1:
        first.sections = [
            (f"{title} (rank {rank})", text)
            for rank in ranks
            for title, text in reports[rank].sections
        ]
    first.duration = max(report.duration for report in reports.values())
    first.start = min(report.start for report in reports.values())
    first.stop = max(report.stop for report in reports.values())
    return first


def _failures(failed: Mapping[str, pytest.TestReport], size: int) -> "Failures":
    """Their tracebacks; one that is the same on several ranks, but for addresses, is shown once."""
    by_text: dict[str, tuple[list[str], Any]] = {}
    for place, report in failed.items():
        text = re.sub(r"\b0x[0-9a-f]+", "0x", str(report.longrepr))
        by_text.setdefault(text, ([], report.longrepr))[0].append(place)
    return Failures(
        {
            f"all {size} ranks" if len(places) == size else ", ".join(places): traceback
            for places, traceback in by_text.values()
        }
    )


def _weight(report) -> int:
    """Which of two reports decides: the lower one."""
    if report.failed:
        # With strict=True a test "fails" here that was to fail: it did so if it did anywhere.
        return 2 if str(report.longrepr).startswith("[XPASS(strict)]") else 0
    if has_raised(report):
        return 1
    return 4 if report.skipped else 3


def lost(item, reason: str, sections: Sequence[tuple[str, str]] = ()) -> pytest.TestReport:
    """The report of a test whose job ended before it did."""
    report = _report(item, "failed", "call")
    report.longrepr = Failures(notes=[reason])
    report.sections = list(sections)
    return report


def passed_teardown(item) -> pytest.TestReport:
    """The report that ends a test which had no teardown of its own."""
    return _report(item, "passed", "teardown")


def _report(item, outcome, when) -> Any:
    keywords: Any = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, None, when)


@dataclass
class Failures:
    """What pytest shows of a test that failed on some ranks.

    Attributes:
      tracebacks: The name of a rank, or of several -> what its own pytest would have shown.
      notes: Further lines, below them.
    """

    tracebacks: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def reprcrash(self) -> "_Crash | None":
        """What the short summary shows: the first rank's exception."""
        for place, traceback in self.tracebacks.items():
            crash = getattr(traceback, "reprcrash", None)
            text = crash.message if crash is not None else str(traceback)
            return _Crash(f"{place}: {text}")
        return _Crash(self.notes[0].splitlines()[0]) if self.notes else None

    def toterminal(self, tw):
        """Writes it to pytest's terminal."""
        for place, traceback in self.tracebacks.items():
            tw.sep("-", place)
            if hasattr(traceback, "toterminal"):
                traceback.toterminal(tw)
            else:
                tw.line(str(traceback))
        for note in self.notes:
            tw.line(note, red=True)

    def __str__(self):
        parts = [f"--- {place} ---\n{text}" for place, text in self.tracebacks.items()]
        return "\n".join([*parts, *self.notes])


@dataclass(frozen=True)
class _Crash:
    message: str

    def __str__(self):
        return self.message
