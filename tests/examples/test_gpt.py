"""The GPT example: the same losses on any number of ranks, and after a checkpoint."""

import re
import shutil
import subprocess
import sys

import pytest
from support import jobs

EXAMPLE = jobs.REPOSITORY / "examples" / "gpt.py"
SMALL = ["--steps=4", "--every=2", "--width=32", "--length=16", "--rows=16"]


@pytest.fixture
def run(tmp_path):
    """Runs the example on some ranks; returns {step: (loss, held-out loss)} and its output."""

    def run(ranks, *options):
        launcher = ["-m", "multimesh.launch.mmrun", "-n", str(ranks), sys.executable]
        ended = subprocess.run(
            [sys.executable, *(launcher if ranks > 1 else []), str(EXAMPLE), *SMALL, *options],
            cwd=tmp_path,
            env=jobs.clean_environment() | jobs.COMPILE_QUICKLY,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        found = re.findall(r"step (\d+): loss ([\d.]+), held out ([\d.]+)", ended.stdout)
        return {int(step): (float(loss), float(held)) for step, loss, held in found}, ended.stdout

    return run


def test_the_same_losses_on_one_and_two_ranks_and_resumed_on_four(run, tmp_path):
    alone, output = run(1)
    assert alone.keys() == {2, 4}
    assert alone[4][1] < alone[2][1]
    assert "bigram model: held-out loss" in output and "def " in output
    two, _ = run(2, "--checkpoints=two")
    assert_close(two, alone)
    shutil.rmtree(tmp_path / "two" / "4")
    four, _ = run(4, "--checkpoints=two", "--resume")
    assert_close(four, {4: two[4]})


def assert_close(losses, expected):
    assert losses.keys() == expected.keys()
    for step, values in expected.items():
        assert losses[step] == pytest.approx(values, abs=2e-5)
