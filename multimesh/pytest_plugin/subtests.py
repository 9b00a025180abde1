"""Subtests, of pytest's `subtests` fixture and of unittest's `subTest`, as parts of their test.

Each makes a report of its own while its test runs. Ranks may run different subtests, so they do not
meet after each: one that failed makes its test fail, and that is what the ranks agree on.
"""

from typing import Any

import pytest

from multimesh.pytest_plugin.reports import Failures

__all__ = ["Subtests"]


class Subtests:
    """Collects the failed subtests of the running test; a plugin of each rank.

    Attributes:
      is_test_running: Whether a report that is made now is one of a subtest.
    """

    def __init__(self):
        self.is_test_running = False
        self._failed: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self):
        """Notes when a test begins and ends."""
        self._failed, self.is_test_running = {}, True
        try:
            return (yield)
        finally:
            self.is_test_running = False

    def pytest_runtest_logreport(self, report):
        """Keeps what a failed subtest shows."""
        if self.is_test_running and report.failed:
            name = f"subtest {len(self._failed) + 1} that failed: {report.head_line}"
            self._failed[name] = report.longrepr

    def add_to(self, report):
        """Makes the test's own report one of a failure if a subtest failed."""
        if self._failed:
            own = {"the test itself": report.longrepr} if report.failed else {}
            report.outcome = "failed"
            report.longrepr = Failures({**self._failed, **own})
