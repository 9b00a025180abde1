"""The example trains to the same numbers however it is started, and to those of plain JAX."""

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from support import jobs

EXAMPLE = jobs.REPOSITORY / "examples" / "digits.py"
EPOCHS = 2  # of 11 steps
STEPS = 20

ALONE = "python"
ALONE_WITH_GLOO = "python, gloo"
RANKS_2, RANKS_4 = "mmrun -n 2", "mmrun -n 4"


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory):
    """The first losses of the example, started in one of the ways above; each runs once."""
    folder = tmp_path_factory.mktemp("losses")

    @functools.cache
    def losses(way):
        path = folder / way
        options = ["--epochs", str(EPOCHS), "--losses", str(path)]
        ranks = int(way.split()[-1]) if "mmrun" in way else 1
        launcher = ["-m", "multimesh.launch.mmrun", "-n", str(ranks), sys.executable]
        command = [sys.executable, *(launcher if ranks > 1 else []), str(EXAMPLE), *options]
        if way == ALONE_WITH_GLOO:
            command += ["--collectives", "gloo"]
        with _cores(ranks):
            result = subprocess.run(
                command, env=jobs.clean_environment(), capture_output=True, text=True, timeout=300
            )
        assert result.returncode == 0, result.stderr
        assert "test accuracy" in result.stdout.splitlines()[-1]
        return np.loadtxt(path, dtype=np.float32)[:STEPS]

    return losses


@contextlib.contextmanager
def _cores(count):
    """What starts here may use so many cores; mmrun then gives each of so many ranks one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def plain_losses():
    """The same training in plain JAX on one device, without microbatches."""
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)

    @jax.jit
    def step(state, batch):
        loss, gradients = jax.value_and_grad(digits.loss_fn)(state.params, batch)
        return loss, state.apply_gradients(grads=gradients)

    train, _ = digits.load_data()
    batches = [batch for epoch in range(EPOCHS) for batch in digits.batches(train, epoch)]
    params = jax.jit(digits.init_params)(jax.random.key(42), batches[0])
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(digits.LEARNING_RATE))
    losses = []
    for batch in batches[:STEPS]:
        loss, state = step(state, batch)
        losses.append(float(loss))
    return np.array(losses, np.float32)


@pytest.mark.parametrize("way", [RANKS_4, ALONE_WITH_GLOO])
def test_losses_are_equal_to_the_bit(losses_of, way):
    np.testing.assert_array_equal(losses_of(way), losses_of(RANKS_2))


@pytest.mark.parametrize("way", [RANKS_2, ALONE])
def test_losses_are_those_of_plain_jax(losses_of, plain_losses, way):
    # Sums in another order, fed through twenty steps of Adam.
    np.testing.assert_allclose(losses_of(way), plain_losses, rtol=2e-5)
