"""A small training that can be stopped after any step, and goes on from there.

    python train.py                  one process
    mmrun -n 2 python train.py       two ranks
    sbatch one_node.sbatch           the same inside a SLURM job

Four layers, each on two of eight CPU devices, learn a function of eight numbers. The last state
lies in a file, `train.state`: a run starts from it if there is one, and writes it when SLURM is
about to stop the job, and at the end.
"""

import argparse
import os
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import serialization

from multimesh import init, preempted
from multimesh.jax import Task, TaskMesh, fetch, register_task
from multimesh.jax.flax import parallelize_step

LAYERS = 4
ROWS = 64


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(LAYERS - 1):
            x = nn.tanh(nn.Dense(32, name=f"layer_{index}")(x))
        return nn.Dense(1, name=f"layer_{LAYERS - 1}")(x)


def register_stages():
    first = TaskMesh(devices=(0, 1), axis_names=("data",), axis_sizes=(2,))
    for index in range(LAYERS):
        mesh = first.place((2 * index, 2 * index + 1))
        register_task(f"layer_{index}", task=Task(mesh=mesh, logical_axes=[("batch", "data")]))


def make_batch(seed, step):
    """The batch of a step depends on nothing but its number, so that a resumed run sees it too."""
    x = np.random.default_rng((seed, step)).normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}


def save(path, state):
    """Writes the state, on rank 0; it is never half a file, whenever the job is killed."""
    values = fetch(state, to=0)
    if jax.process_index() == 0:
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(serialization.to_bytes(values))
        os.replace(part, path)


def restore(path, state):
    """Reads the state, on every rank; each takes what lies on its own devices."""

    def place(leaf, values):
        values = np.asarray(values)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: values[index], dtype=leaf.dtype
        )

    values = serialization.from_bytes(state, path.read_bytes())
    return jax.tree.map(place, state, values)


def main():
    options = parse_options()
    init(cpus=8)
    register_stages()
    model = Model()
    step_fn, state, _ = parallelize_step(
        model,
        optax.adam(1e-2),
        loss_fn=lambda params, batch: ((model.apply(params, batch["x"]) - batch["y"]) ** 2).mean(),
        init_fn=lambda key, batch: model.init(key, batch["x"]),
        rng=jax.random.key(options.seed),
        global_batch=make_batch(options.seed, 0),
        num_microbatches=4,
        reduction="mean",
    )
    start = 0
    if options.state.exists():
        state = restore(options.state, state)
        start = int(fetch(state.step))

    is_leader = jax.process_index() == 0
    for step in range(start, options.steps):
        loss, state = step_fn(state, make_batch(options.seed, step))
        if is_leader:
            print(f"step {step}: loss {loss:.9g}")
        time.sleep(options.pause)
        if preempted():  # on all ranks after the same step
            break
    save(options.state, state)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("train.state"), metavar="FILE")
    parser.add_argument("--pause", type=float, default=0, metavar="S", help="seconds after a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
