"""Checkpoints from job to job: other rank counts, other layouts, plain JAX, a rank that dies."""

import subprocess
import sys

import jax
import orbax.checkpoint as ocp
import pytest
from support import jobs, oracle
from support.checkpoint_job import CASE, ROWS

PROGRAM = jobs.REPOSITORY / "tests" / "support" / "checkpoint_job.py"
STEPS = 2  # of each job
JOBS = [
    (4, "two stages"),
    (2, "a mesh of 2 x 2"),
    (1, "one stage"),
    (2, "two narrow stages"),
]


def run(ranks, folder, layout, *options):
    """Runs the job; returns its exit code and what it says about errors."""
    launcher = ["-m", "multimesh.launch.mmrun", "-n", str(ranks), sys.executable]
    command = [sys.executable, *(launcher if ranks > 1 else []), PROGRAM, folder, layout]
    result = subprocess.run(
        [*map(str, command), str(STEPS), *options],
        env=jobs.clean_environment() | jobs.COMPILE_QUICKLY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder that one job after another has gone on from."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for ranks, layout in JOBS:
        code, errors = run(ranks, folder, layout)
        assert code == 0, errors
    return folder


@pytest.fixture(scope="module")
def expected():
    """The same training in plain JAX, all at once."""
    return oracle.train(CASE, CASE.batches(ROWS, STEPS * len(JOBS)))


def test_other_rank_counts_and_layouts_go_on(trained, expected):
    assert sorted(path.name for path in trained.iterdir()) == ["4", "6", "8"]
    # Orbax alone reads a tree of dicts, lists and NumPy arrays.
    got = ocp.StandardCheckpointer().restore(trained / "8" / "state")
    oracle.assert_tree_close(by_name(got), by_name(expected.state), "state")


def by_name(tree):
    """Leaves by name, the same for tuples and lists, and whether Flax boxes a leaf or not."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_plain_jax_goes_on(trained, expected):
    def restore(state):
        return ocp.StandardCheckpointer().restore(trained / "4" / "state", state)

    got = oracle.train(CASE, CASE.batches(ROWS, 8)[4:], restore=restore)
    oracle.assert_tree_close(got.outputs, expected.outputs[4:], "outputs")
    oracle.assert_tree_close(got.state, expected.state, "state")


def test_a_rank_that_dies_while_it_writes(tmp_path):
    assert run(1, tmp_path, "two stages")[0] == 0
    code, errors = run(2, tmp_path, "two stages", "--die")
    assert code != 0
    assert "SIGKILL" in errors or "signal 9" in errors, errors
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "2"
    assert [name.startswith("4.orbax-checkpoint-tmp") for name in left[1:]] == [True]
    # The next job goes on from step 2, and clears away what was left.
    code, errors = run(1, tmp_path, "two stages")
    assert code == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    state = ocp.StandardCheckpointer().restore(tmp_path / "4" / "state")
    assert state["step"] == 4
