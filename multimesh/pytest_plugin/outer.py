"""The pytest that was started by hand: runs marked tests in MPI jobs, and reports them as its own.

Marked tests of a file with equal needs are one job. Its ranks report each test as they go, so
results appear as they would without it. A test that ends its job, by a crash or a hang, fails;
the tests after it get a new one.
"""

from dataclasses import dataclass

import pytest

from multimesh.pytest_plugin import reports
from multimesh.pytest_plugin.job import Job
from multimesh.pytest_plugin.needs import Needs, needs_of

__all__ = ["Outer"]

_PHASES = ("setup", "call", "teardown")
_NEEDS = pytest.StashKey[Needs | None]()


class Outer:
    """The hooks."""

    def __init__(self, config):
        self._config = config
        self._job: Job | None = None
        self._unrun: dict[tuple, list[pytest.Item]] = {}
        self._hopeless: dict[tuple, _Problem] = {}  # jobs that end before their first test

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Brings the tests of each job together, where the first of them stands."""
        first: dict[object, int] = {}
        for position, item in enumerate(items):
            item.stash[_NEEDS] = needs_of(item)
            first.setdefault(_key(item), position)
        items.sort(key=lambda item: first[_key(item)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Notes which tests there are, now that no plugin deselects any more."""
        for item in session.items:
            if item.stash.get(_NEEDS, None) is not None:
                self._unrun.setdefault(_key(item), []).append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Reports what a job's ranks report, in place of running the test here."""
        if item.stash.get(_NEEDS, None) is None:
            return None
        hooks = item.ihook
        hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item):
            hooks.pytest_runtest_logreport(report=report)
        self._tear_down_others(item, nextitem)
        hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self):
        """Ends a job that still runs, as after -x."""
        self._close_job()

    def _run(self, item) -> list[pytest.TestReport]:
        """The reports of a test, from the running job or a new one."""
        key = _key(item)
        if key in self._hopeless:
            return _phases({}, item, self._hopeless[key])
        if self._job is None:
            tests = [other.nodeid for other in self._unrun[key]]
            self._job = Job(self._config, item.stash[_NEEDS], item.path, tests)
        job = self._job
        self._unrun[key].remove(item)
        is_done = job.wait_for(item.nodeid)
        for log in job.logs:
            for reason, code in log.exits:
                self._close_job()
                pytest.exit(reason, code)  # here too, as a test without ranks would
        problem = _problem(item, job, is_done)
        if problem is not None and not job.has_started_a_test:
            self._hopeless[key] = problem
        merged = _merged(self._config, item, job)
        if not is_done or not self._unrun[key]:
            self._close_job()
        return _phases(merged, item, problem)

    def _close_job(self):
        if self._job is not None:
            self._job.close()
            self._job = None

    def _tear_down_others(self, item, nextitem):
        """Ends fixtures of tests that ran here, which pytest kept for the file's other tests."""
        # pytest has no public name for this, and other plugins call it too.
        tear_down = item.session._setupstate.teardown_exact
        call = pytest.CallInfo.from_call(lambda: tear_down(nextitem), when="teardown")
        if call.excinfo is not None:
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
            item.ihook.pytest_runtest_logreport(report=report)


def _key(item):
    """Equal for the tests of one job; any other test is alone."""
    needs = item.stash[_NEEDS]
    return item if needs is None else (item.path, needs)


@dataclass(frozen=True)
class _Problem:
    """What kept a test from its end: a line for the user, and texts by title."""

    text: str
    sections: tuple[tuple[str, str], ...] = ()


def _problem(item, job, is_done) -> _Problem | None:
    missing = [log.place for log in job.logs if item.nodeid in log.missing]
    if missing and job.has_started_a_test:
        return _Problem(
            f"{missing[0]} has no such test. A test's name and parameters must be the same on "
            "every rank and outside the job."
        )
    if is_done and not job.has_failed:
        return None
    failed_imports = [(f"Import on {log.place}", text) for log in job.logs for text in log.imports]
    stacks = [(f"Stacks of {place}", text) for place, text in job.stacks() if job.expired]
    return _Problem(job.ending(), (*failed_imports, *stacks, ("Output of the job", job.output())))


def _merged(config, item, job) -> dict[str, pytest.TestReport]:
    """One report for each phase that some rank has reported."""
    of_ranks = job.reports_of(config, item.nodeid)
    places = [log.place for log in job.logs]
    merged = {}
    for phase in _PHASES:
        of_phase = {rank: found[phase] for rank, found in enumerate(of_ranks) if phase in found}
        if of_phase:
            merged[phase] = reports.merge(of_phase, places)
    return merged


def _phases(merged, item, problem) -> list[pytest.TestReport]:
    """The reports to show for a test, whatever kept it from its end among them."""
    if problem is not None:
        failed = next((report for report in merged.values() if report.failed), None)
        if failed is None:
            captured = merged["call"].sections if "call" in merged else []
            merged["call"] = reports.lost(item, problem.text, [*captured, *problem.sections])
        elif isinstance(failed.longrepr, reports.Failures):
            failed.longrepr.notes.append(f"Other ranks were still in the test. {problem.text}")
    merged.setdefault("teardown", reports.passed_teardown(item))
    return [merged[phase] for phase in _PHASES if phase in merged]
