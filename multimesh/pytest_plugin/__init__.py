"""The pytest plugin: `@pytest.mark.mpi(ranks=2)` runs a test on two ranks.

A pytest process plays one of three parts, and a class holds the hooks of each:

    outer      pytest was started by hand: it starts MPI jobs, and shows what their ranks report
      -> job   one such job, seen from outside
    inside     pytest runs in each rank
      JobRank      of a job that `outer` started: it reports into a file
      PlacedRank   of a job that the user started, as with `mpirun -n 2 pytest`: rank 0 reports
      -> meeting   the ranks keep in step: no test starts before all are done with the last
      -> watchdog  a test that hangs ends the job, with the stacks of its threads

    needs      what a test's marks ask for
    reports    the reports of several ranks as one
    measure    coverage.py in the ranks

MPI cannot be started twice in a process, nor survive a test that kills a rank. So the process that
starts jobs has no MPI of its own, and several ranks never share one pytest.

Every pytest run loads this module once multimesh is installed: it imports neither JAX nor MPI.
"""

from typing import Any

import pytest

from multimesh.errors import UsageError
from multimesh.launch.environment import detect_launcher
from multimesh.pytest_plugin import measure
from multimesh.pytest_plugin.inside import JobRank, PlacedRank, prepare_options
from multimesh.pytest_plugin.job import Order, read_order
from multimesh.pytest_plugin.needs import arguments_of
from multimesh.pytest_plugin.outer import Outer

__all__ = []

_DEFAULT_TIMEOUT = 300
_ORDER = pytest.StashKey[Order | None]()
_MEASURING = pytest.StashKey[Any]()
_PARAMETER = "_mpi_ranks"


def pytest_addoption(parser):
    """Adds the setting of the time limit."""
    parser.addini(
        "mpi_timeout",
        f"seconds that one MPI job of marked tests may take (default: {_DEFAULT_TIMEOUT})",
        default=str(_DEFAULT_TIMEOUT),
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Starts coverage.py before the user's code is imported, which is only what the job needs."""
    launcher, order = detect_launcher(), _order(early_config)
    if launcher is not None and order is not None:
        # Those of the other files on the command line may be for a process alone.
        early_config.known_args_namespace.file_or_dir[:] = [order.path]
        if order.coverage:
            data_file = order.coverage_file(launcher.rank)
            early_config.stash[_MEASURING] = measure.start(order.coverage, data_file)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Changes what a rank's own pytest was asked to do, before other plugins read it."""
    launcher, order = detect_launcher(), _order(config)
    if launcher is not None and (order is not None or launcher.rank > 0):
        prepare_options(config, launcher.rank)
    if order is not None:
        config.args[:] = [order.path]


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Chooses the part that this process plays."""
    config.addinivalue_line(
        "markers",
        "mpi(ranks, timeout, env): run the test on this many ranks of an MPI job, or under each of "
        "several numbers of ranks; timeout: seconds for the job; env: environment variables of it",
    )
    launcher, order = detect_launcher(), _order(config)
    part: Outer | JobRank | PlacedRank
    if launcher is None:
        part = Outer(config)
    elif order is not None:
        part = JobRank(config, launcher, order)
    else:
        part = PlacedRank(config, launcher)
    config.pluginmanager.register(part, "multimesh-part")


def pytest_unconfigure(config):
    """Saves what coverage.py has measured in a rank."""
    measure.save(config.stash.get(_MEASURING, None))


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Makes a test with several numbers of ranks one test for each."""
    try:
        ranks = arguments_of(metafunc.definition).get("ranks")
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
    if ranks is not None and not isinstance(ranks, int):
        # A parameter that no fixture takes: it is there for the test's name and its marks.
        metafunc.fixturenames.append(_PARAMETER)
        metafunc.parametrize(
            _PARAMETER,
            [pytest.param(n, marks=pytest.mark.mpi(ranks=n), id=_name(n)) for n in ranks],
        )


def _order(config) -> Order | None:
    """The order of this process, which can be read once only."""
    if _ORDER not in config.stash:
        config.stash[_ORDER] = read_order()
    return config.stash[_ORDER]


def _name(ranks):
    return f"{ranks} rank{'s' * (ranks > 1)}"
