"""The training of the batch scripts resumes exactly; tests/cluster has SLURM interrupt it."""

import importlib.util

import pytest
from support import jobs

from multimesh.jax import clear_tasks

EXAMPLE = jobs.REPOSITORY / "examples" / "slurm" / "train.py"


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs the example in this process, as with some command line."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)

    def train(*words, preempted_after=None):
        calls = iter(range(1000))
        monkeypatch.setattr(module, "preempted", lambda: next(calls) == preempted_after)
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        clear_tasks()
        module.main()

    yield train
    clear_tasks()


def test_it_resumes_exactly(train, tmp_path, capsys):
    train("--steps", "5", "--state", "whole")
    whole = capsys.readouterr().out.splitlines()
    train("--steps", "5", "--state", "parts", preempted_after=1)
    first = capsys.readouterr().out.splitlines()
    train("--steps", "5", "--state", "parts")
    assert len(first) == 2
    assert first + capsys.readouterr().out.splitlines() == whole
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not list(tmp_path.glob("*.part"))
