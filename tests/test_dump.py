"""What `init(dump=...)` writes: one folder for each step, with its plan and its programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.errors import UsageError
from multimesh.jax import microbatch, parallelize, task

first = task(lambda w, x: jnp.tanh(x @ w), "first", devices=[0])
second = task(lambda w, h: h @ w, "second", devices=[4])


def loss(params, x):
    return (second(params[1], first(params[0], x)) ** 2).sum()


def run():
    x = np.ones((4, 8), np.float32)
    params = [np.ones((8, 8), np.float32)] * 2
    fun = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)
    sharded, _ = parallelize(fun, initial_batch=x)
    sharded(params, x)
    return sharded.plan


def test_a_step_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path / "dump"))
    plan = run()
    (folder,) = (tmp_path / "dump").iterdir()
    files = {file.name: file.read_text() for file in folder.iterdir()}
    kinds = ("jaxpr", "hlo")
    assert files.keys() == {"plan.txt"} | {
        f"{t.name}.{kind}.txt" for t in plan.tasks for kind in kinds
    }
    assert "tanh" in files["F0.jaxpr.txt"]
    assert files["F0.hlo.txt"].startswith("HloModule")
    assert all(f"  {row}" in files["plan.txt"] for row in plan.schedule.splitlines())
    assert "devices (4,), axes {'devices': 1}: second" in files["plan.txt"]
    assert "  F0: first: " in files["plan.txt"]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"dump folder.*cannot be written"):
        run()
