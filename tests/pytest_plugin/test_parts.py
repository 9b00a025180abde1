"""Marks, and what loading the plugin costs. No jobs."""

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from support import jobs

from multimesh.errors import UsageError
from multimesh.pytest_plugin.needs import arguments_of


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        (pytest.mark.mpi(ranks=0), "ranks must be a positive integer, or a sequence of different"),
        (pytest.mark.mpi(ranks=True), "Got ranks=True"),
        (pytest.mark.mpi(ranks=(2, 2)), "ranks must be"),
        (pytest.mark.mpi(ranks="2"), "ranks must be"),
        (pytest.mark.mpi(ranks=2, timeout=0), "timeout must be a positive number of seconds"),
        (pytest.mark.mpi(ranks=2, env={"A": 1}), "env must be a mapping of strings to strings"),
        (pytest.mark.mpi(rank=2), "mpi takes ranks, timeout and env.* Got.*'rank'"),
    ],
)
def test_a_wrong_mark_is_named(mark, complaint):
    with pytest.raises(UsageError, match=rf"test_it.py::test_it: .*{complaint}"):
        arguments_of(Node([mark.mark]))


def test_an_inner_mark_overrides_what_it_repeats():
    marks = [pytest.mark.mpi(ranks=2, timeout=9), pytest.mark.mpi(4), pytest.mark.slow]
    assert arguments_of(Node([mark.mark for mark in marks])) == {"ranks": 4, "timeout": 9}


@dataclass(frozen=True)
class Node:
    """A test, and around it a node for each mark."""

    marks: list
    nodeid: str = "test_it.py::test_it"

    def listchain(self):
        return [SimpleNamespace(own_markers=[mark]) for mark in self.marks]


def test_mistakes_are_errors_of_collection(write, run_pytest):
    write("""
        @pytest.mark.mpi(ranks=0)
        def test_it():
            pass
    """)
    ended = run_pytest("--collect-only")
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert "test_it.py::test_it: mpi's ranks must be" in ended.output


def test_a_mark_without_ranks(write, run_pytest):
    write("""
        @pytest.mark.mpi
        def test_it():
            pass
    """)
    ended = run_pytest("--collect-only")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it: mpi needs a number of ranks here. Got ranks=None" in ended.output


def test_a_wrong_setting_is_named(write, run_pytest):
    write("""
        @two_ranks
        def test_it():
            pass
    """)
    ended = run_pytest("-o", "mpi_timeout=soon", "--collect-only")
    assert "mpi_timeout must be a positive number of seconds. Got 'soon'" in ended.output


def test_loading_the_plugin_loads_neither_jax_nor_mpi():
    code = "import sys, multimesh.pytest_plugin; print({'jax', 'numpy', 'mpi4py'} & {*sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=jobs.clean_environment(),
        capture_output=True,
        text=True,
    )
    assert result.stdout == "set()\n"


def test_the_page_is_true(write, run_pytest, tmp_path):
    page = (jobs.REPOSITORY / "docs" / "testing.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "test_ring.py").write_text(source)
    ended = run_pytest("test_ring.py")
    assert ended.counts == {"passed": 4}
    assert page.partition("```text\n")[2].partition("```")[0] in ended.output
