"""pytest in each rank of a job: all ranks run the same tests in step, and none waits for ever.

After every phase of a test (setup, call, teardown) the ranks meet. If it failed on one, it has
failed on all: no rank starts a phase that another one will not enter. A rank that failed while
the others still wait for it in the test cannot be waited for; it ends the job.
"""

import json
import os
import socket
import sys
import time

import pytest

from multimesh import _mpi
from multimesh.launch import failure
from multimesh.launch.environment import Launcher
from multimesh.pytest_plugin import reports
from multimesh.pytest_plugin.job import Order
from multimesh.pytest_plugin.meeting import Meeting, Outcome
from multimesh.pytest_plugin.needs import needs_of, time_limit
from multimesh.pytest_plugin.subtests import Subtests
from multimesh.pytest_plugin.watchdog import Watchdog

__all__ = ["JobRank", "PlacedRank", "prepare_options"]

# Seconds that a rank whose test has failed waits for the others.
_FAILED_WAITS = 5.0
# Between a rank's stacks and its end: in place, where nobody else ends the job, and in a job of
# ours, where the pytest outside should have ended it by then.
_PLACED_PATIENCE, _JOB_PATIENCE = 1.0, 15.0
# Plugins of pytest's own that write to the terminal or to the cache.
_FOR_ONE_RANK = ("terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin")


def prepare_options(config, rank: int):
    """Keeps a rank from writing what one process is to write for all."""
    for name in ("xmlpath", "cacheclear", "pastebin"):
        if hasattr(config.option, name):
            setattr(config.option, name, None)
    config.option.usepdb = False
    if config.option.basetemp:
        config.option.basetemp = f"{config.option.basetemp}-rank-{rank}"


class Rank:
    """What is the same for every rank: meeting the others after each phase of a test."""

    _meeting: Meeting  # from when the tests are collected, if there are several ranks

    def __init__(self, config, launcher: Launcher):
        self._config = config
        self._rank = launcher.rank
        self._launcher_size = launcher.size
        self._meets = False
        self._follows = False  # it ends its session because another rank has
        self._subtests = Subtests()
        config.pluginmanager.register(self._subtests, "multimesh-subtests")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session):
        """Starts the meetings, when every rank has collected its tests."""
        if session.config.option.collectonly or self._launcher_size == 1:
            return (yield)
        self._meeting, self._meets = Meeting(_mpi.communicator()), True
        if self._launcher_size not in (None, self._meeting.size):
            raise pytest.UsageError(
                f"The launcher started {self._launcher_size} ranks, but MPI sees "
                f"{self._meeting.size}. Use the launcher of the MPI that mpi4py loads; mmrun does."
            )
        self._compare(session)
        return (yield)

    def _compare(self, session):
        """Ends the session on all ranks where they have not collected the same tests."""
        collected = self._meeting.exchange((session.testsfailed, [i.nodeid for i in session.items]))
        for rank, (failures, tests) in enumerate(collected):
            if failures and not session.testsfailed:
                raise session.Interrupted(f"rank {rank} could not collect its tests")
            different = set(tests) ^ set(collected[0][1])
            if different and not failures:
                raise pytest.UsageError(
                    "Every rank must collect the same tests in the same order. Only one of rank 0 "
                    f"and rank {rank} has {sorted(different)[0]}."
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        """Agrees with the other ranks on how a phase of a test went."""
        report = yield
        if self._subtests.is_test_running:
            return report
        if report.when == "call":
            self._subtests.add_to(report)
        self._note(report)
        if not self._meets:
            return report
        agreed = self._agree(report)
        if report.when == "setup" and report.skipped and agreed is report:
            # This rank skips the test, and meets those that run it where they meet next.
            agreed = self._agree(report)
        return agreed

    def _agree(self, report):
        outcome = Outcome.EXPECTED if reports.has_raised(report) else Outcome.FINE
        outcome = Outcome.FAILED if report.failed else outcome
        limit = _FAILED_WAITS if reports.has_raised(report) else None
        outcomes = self._meeting.hold(outcome, limit)
        if outcomes is None:
            self._give_up(report)
            raise AssertionError("the process has ended")
        if Outcome.LEAVING in outcomes:
            leaving = outcomes.index(Outcome.LEAVING)
            self._follows = True
            pytest.exit(f"rank {leaving} has ended its session", returncode=1)
        if Outcome.FAILED in outcomes or Outcome.EXPECTED in outcomes:
            return self._share(report, outcomes)
        return report

    def _note(self, report):
        """Keeps a phase's report before the others are waited for."""

    def _share(self, report, outcomes):
        """The report to go on with after a phase that raised on some rank, here or elsewhere."""
        raise NotImplementedError

    def _give_up(self, report):
        """Ends the job: the others wait in the test that has failed here."""
        raise NotImplementedError


class JobRank(Rank):
    """A rank of a job that `outer` started: it reports into a file, and prints nothing."""

    def __init__(self, config, launcher: Launcher, order: Order):
        super().__init__(config, launcher)
        self._order = order
        self._file = open(order.report_file(launcher.rank), "a", buffering=1)  # noqa: SIM115
        self._write("host", socket.gethostname())
        self._stacks = open(order.stacks_file(launcher.rank), "w")  # noqa: SIM115
        self._watchdog = Watchdog(self._stacks.fileno(), _JOB_PATIENCE, order.is_abandoned)
        self._arm()
        _silence(config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leaves those tests that were ordered."""
        found = {item.nodeid: item for item in items}
        for test in self._order.tests:
            if test not in found:
                self._write("missing", test)
        ordered = [found[test] for test in self._order.tests if test in found]
        others = [item for item in items if item not in ordered]
        config.hook.pytest_deselected(items=others)
        items[:] = ordered

    def pytest_keyboard_interrupt(self, excinfo):
        """Tells of a `pytest.exit`, and takes the other ranks along."""
        if isinstance(excinfo.value, pytest.exit.Exception) and not self._follows:
            self._write("exit", excinfo.value.msg, code=excinfo.value.returncode)
            if self._meets and self._meeting.hold(Outcome.LEAVING, _FAILED_WAITS) is None:
                failure.leave(1)  # the others wait in the test

    def pytest_collectreport(self, report):
        """Tells of files that cannot be imported here."""
        if report.failed:
            self._write("import", str(report.longrepr))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Tells of a test's start and end."""
        self._write("start", item.nodeid)
        result = yield
        self._write("end", item.nodeid)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        """Arms the watchdog: pytest's own uses, and stops, the same timer."""
        self._arm()

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """A job with failed tests has done what it should."""
        if exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.OK

    def _arm(self):
        self._watchdog.arm(self._order.deadline - time.time())

    def _note(self, report):
        self._write("report", report.nodeid, report=reports.to_json(self._config, report))

    def _share(self, report, outcomes):
        if report.failed or Outcome.FAILED not in outcomes:
            return report
        # Its own report is written; this one only makes pytest go on as on the failed rank.
        report.outcome = "failed"
        report.longrepr = f"failed on rank {outcomes.index(Outcome.FAILED)}"
        return report

    def _give_up(self, report):
        failure.leave(1)

    def _write(self, kind, value, **more):
        self._file.write(json.dumps({"kind": kind, "value": value, **more}) + "\n")


class PlacedRank(Rank):
    """A rank of a job that the user started: rank 0 reports for all."""

    def __init__(self, config, launcher: Launcher):
        super().__init__(config, launcher)
        of_all = f" of {launcher.size}" if launcher.size else ""
        self._place = f"rank {launcher.rank}{of_all} on {socket.gethostname()}"
        self._status = pytest.ExitCode.OK
        # Before tests run, standard error is not yet captured.
        self._watchdog = Watchdog(os.dup(sys.stderr.fileno()), _PLACED_PATIENCE, lambda: False)
        self._test_deadline = 0.0
        if launcher.rank:
            _silence(config)

    def pytest_collection_modifyitems(self, items):
        """Skips tests that need other ranks or variables than there are."""
        size = self._launcher_size or _mpi.communicator().size
        for item in items:
            needs = needs_of(item)
            if needs is not None:
                reason = _reason_to_skip(needs, size)
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collectreport(self, report):
        """Shows what rank 0 may not see."""
        if report.failed and self._rank:
            self._show(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Gives each test its time."""
        needs = needs_of(item)
        seconds = time_limit(self._config) if needs is None else needs.timeout
        self._test_deadline = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Arms the watchdog: pytest's own uses, and stops, the same timer."""
        message = f"{self._place}: {item.nodeid} took longer than its time limit.\n"
        self._watchdog.arm(self._test_deadline - time.monotonic(), message)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self):
        """Between tests nothing can hang."""
        self._watchdog.disarm()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus):
        """Notes how the session ended."""
        self._status = exitstatus

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        """Leaves together with the others: the first to go with an error ends the job."""
        self._watchdog.disarm()
        if not self._meets:
            return
        sys.stdout.flush()
        is_orderly = self._status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        limit = None if is_orderly else _FAILED_WAITS
        if self._meeting.hold(Outcome.LEAVING, limit) is None:
            failure.abort(int(self._status))

    def _share(self, report, outcomes):
        everyone = self._meeting.exchange((self._place, reports.to_json(self._config, report)))
        of_ranks = dict(enumerate(reports.from_json(self._config, line) for _, line in everyone))
        return reports.merge(of_ranks, [place for place, _ in everyone])

    def _give_up(self, report):
        self._show(report)
        failure.abort(1)

    def _show(self, report):
        sys.stderr.write(f"{self._place}: {report.nodeid}\n{report.longrepr}\n")
        sys.stderr.flush()


def _silence(config):
    """Takes away the plugins that show and keep results: another process does that."""
    for name in _FOR_ONE_RANK:
        plugin = config.pluginmanager.get_plugin(name)
        if plugin is not None:
            config.pluginmanager.unregister(plugin)


def _reason_to_skip(needs, size) -> str:
    if needs.ranks != size:
        return f"needs {needs.ranks} ranks; {size} are running"
    unset = [f"{name}={value}" for name, value in needs.env if os.environ.get(name) != value]
    return f"needs the environment variables {' '.join(unset)}" if unset else ""
