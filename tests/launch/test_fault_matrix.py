"""Jobs end as promised when one of their ranks goes wrong: the covering set of the fault matrix.

The matrix and the promises are in tests/support/faults; `scripts/fault-matrix` runs all of it.
"""

import dataclasses
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.faults import table
from support.faults.cells import all_cells, covering_set
from support.faults.contract import PROMISES, broken_promises
from support.faults.job import Ended, run_cell
from support.faults.launchers import why_unavailable
from support.faults.limits import LIMITS, PROMPT, excused_promises
from support.jobs import REPOSITORY

COVERING_SET = covering_set()
# Many jobs mostly wait for a timeout, so a few at once cost little more than one.
JOBS_AT_ONCE = 3


@pytest.fixture(scope="module")
def ends(request):
    """How each cell's job ended, as a function; all selected cells run meanwhile."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if item.path == request.path and "ends" in item.fixturenames
    ]
    reasons = _why_unavailable(request, {cell.launcher for cell in cells})
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        futures = {
            str(cell): pool.submit(run_cell, cell) for cell in cells if not reasons[cell.launcher]
        }

        def end_of(cell):
            if reasons[cell.launcher]:
                pytest.skip(reasons[cell.launcher])
            return futures[str(cell)].result()

        yield end_of
        pool.shutdown(cancel_futures=True)


def _why_unavailable(request, launchers):
    """Why each launcher's cells cannot run here; empty for those that can."""
    reasons = {launcher: why_unavailable(launcher) for launcher in launchers}
    if any(launcher.plugin for launcher in launchers):
        try:
            request.getfixturevalue("slurm")
        except pytest.skip.Exception as reason:
            reasons |= {launcher: str(reason) for launcher in launchers if launcher.plugin}
    return reasons


@pytest.mark.parametrize("cell", COVERING_SET, ids=str)
def test_the_job_ends_as_promised(cell, ends):
    ended = ends(cell)
    broken = broken_promises(cell, ended)
    assert not broken.keys() - excused_promises(cell), f"{broken}\n{ended.output}"


def pairs(cell):
    values = (cell.kind.name, cell.moment, cell.place, cell.launcher.name)
    return set(itertools.combinations(enumerate(values), 2))


def test_the_set_is_small_and_brings_every_two_values_together():
    assert len(COVERING_SET) <= 80
    possible = set().union(*map(pairs, all_cells()))
    assert set().union(*map(pairs, COVERING_SET)) == possible


def test_every_limit_is_about_some_cell_and_a_promise():
    for limit in LIMITS:
        assert any(map(limit.covers, all_cells())), limit.reason
        assert limit.promises <= {*PROMISES, PROMPT}


GOOD_END = Ended(
    code=1,
    stdout="",
    stderr=f"""[1] Traceback (most recent call last):
[1] InjectedFault: raise
mmrun: rank 1 on {socket.gethostname()} failed with exit code 1
""",
    seconds=1.0,
    wall=2.0,
    left=(),
)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, set()),
        ({"seconds": None}, {"fault"}),
        ({"seconds": 11.0}, {"end"}),
        ({"code": None}, {"end", "summary"}),
        ({"code": 0}, {"failure", "summary"}),
        ({"code": 2}, {"code", "summary"}),
        ({"stdout": GOOD_END.stderr}, {"traceback"}),
        ({"stderr": GOOD_END.stderr + "[0] and on\n"}, {"summary"}),
        ({"stderr": GOOD_END.stderr.replace("rank 1 on", "rank 0 on")}, {"summary"}),
        ({"stderr": GOOD_END.stderr.replace("mmrun", "more\nmmrun")}, {"summary"}),
        ({"left": ("7: python train.py",)}, {"processes"}),
    ],
)
def test_every_promise_is_checked(change, broken):
    cell = next(cell for cell in all_cells() if str(cell) == "raise.in-step.1of2.mmrun-openmpi")
    assert broken_promises(cell, dataclasses.replace(GOOD_END, **change)).keys() == broken


def test_the_documented_table_is_up_to_date():
    page = (REPOSITORY / "docs" / "faults.md").read_text()
    assert table.text() in page, "put in what scripts/fault-matrix --table prints"
