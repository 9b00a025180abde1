"""Handwritten digits: a four-layer MLP, trained as a pipeline of two stages.

    mmrun -n 2 python examples/digits.py     one stage on each of two processes
    python examples/digits.py                the same program in one process

There are eight CPU devices. Layers 0 and 1 run on devices 0 to 3, layers 2 and 3 on devices 4 to 7,
and each stage spreads the rows of a microbatch over its four devices. While the second stage works
on one microbatch, the first is already busy with the next. The model itself knows nothing of this.
"""

import argparse

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from tqdm import tqdm

from multimesh import init
from multimesh.jax import Task, TaskMesh, register_task
from multimesh.jax.flax import parallelize_eval, parallelize_step

BATCH_ROWS = 128
TEST_ROWS = 384
MICROBATCHES = 8
LEARNING_RATE = 3e-3
SEED = 0


class Classifier(nn.Module):
    """From (rows, 64) pixels to (rows, 10) logits."""

    @nn.compact
    def __call__(self, x):
        for index, features in enumerate((128, 128, 64)):
            x = nn.relu(nn.Dense(features, name=f"layer_{index}")(x))
        return nn.Dense(10, name="layer_3")(x)


MODEL = Classifier()


def register_stages():
    """Says where each layer runs, by the names of the layers."""
    first = TaskMesh(devices=(0, 1, 2, 3), axis_names=("data",), axis_sizes=(4,))
    second = first.place((4, 5, 6, 7))
    rows = [("batch", "data")]
    register_task("layer_[01]", task=Task(mesh=first, logical_axes=rows))
    register_task("layer_[23]", task=Task(mesh=second, logical_axes=rows))


def loss_fn(params, batch):
    logits = MODEL.apply(params, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def accuracy(params, batch):
    logits = MODEL.apply(params, batch["images"])
    return (logits.argmax(axis=-1) == batch["labels"]).mean()


def init_params(key, batch):
    return MODEL.init(key, batch["images"])


def load_data():
    """Returns the training and the test data, the same on every rank."""
    digits = load_digits()
    images = digits.data.astype(np.float32) / 16  # 8 x 8 pixels, from 0 to 16
    data = {"images": images, "labels": digits.target.astype(np.int32)}
    order = np.random.default_rng(SEED).permutation(len(images))
    return take(data, order[TEST_ROWS:]), take(data, order[:TEST_ROWS])


def batches(data, epoch):
    """Yields the batches of an epoch, in an order of its own; the few rows left over wait."""
    order = np.random.default_rng((SEED, epoch)).permutation(len(data["labels"]))
    for start in range(0, len(order) - BATCH_ROWS + 1, BATCH_ROWS):
        yield take(data, order[start : start + BATCH_ROWS])


def take(data, rows):
    return {name: values[rows] for name, values in data.items()}


def main():
    options = parse_options()
    init(cpus=8, collectives=options.collectives)
    register_stages()
    train, test = load_data()
    step_fn, state, mesh = parallelize_step(
        MODEL,
        optax.adam(LEARNING_RATE),
        loss_fn=loss_fn,
        init_fn=init_params,
        global_batch=next(batches(train, epoch=0)),
        num_microbatches=MICROBATCHES,
        reduction="mean",
    )
    eval_fn = parallelize_eval(
        accuracy, state, mesh, global_batch=test, num_microbatches=MICROBATCHES, reduction="mean"
    )

    is_leader = jax.process_index() == 0
    history = []
    for epoch in tqdm(range(options.epochs), unit="epoch", disable=not is_leader):
        losses = []
        for batch in batches(train, epoch):
            loss, state = step_fn(state, batch)
            losses.append(loss)
        history += map(float, losses)
        if is_leader:
            tqdm.write(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    test_accuracy = eval_fn(state, test)
    if is_leader:
        if options.losses:
            np.savetxt(options.losses, history, fmt="%.9g")  # 9 digits tell any two float32 apart
        print(f"test accuracy: {test_accuracy:.2%}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--collectives", choices=["gloo"], help="let one process add as ranks do")
    parser.add_argument("--losses", metavar="FILE", help="write the loss of every step to FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
