"""What is trained: a model with its optimizer, loss, batches and the stages it is cut into.

A `Case` is independent of the devices and of the number of microbatches; a `Layout` says where
its stages lie. `build` puts the two together through the public API.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from multimesh.jax import Task, TaskMesh, Weighted, clear_tasks, register_task
from multimesh.jax.flax import parallelize_step
from support import models

__all__ = ["CASES", "Case", "Layout", "apart", "build", "echo", "mlp", "on_one", "register", "wide"]

LOGICAL_AXES = (("batch", "x"), ("data", "x"), ("model", "y"))


@dataclass(frozen=True)
class Case:
    """One thing to train.

    Attributes:
      name: What tests call it.
      model: An ordinary Flax module that takes the batch.
      optimizer: An optax transformation.
      stages: Pattern of the registry -> stage.
      loop: The fewest tasks that one microbatch can be cut into, as `plans.loop_tasks` names
        them: phases, then submesh.
      make_batch: (rows, seed) -> a tree of numpy arrays.
      loss: (model, params, batch) -> scalar, `Weighted`, or either with a dict of metrics; None
        for the default, `model.apply`.
      reduction: How scalars of microbatches combine; None for `Weighted` losses.
      has_aux: Whether the loss gives metrics.
      unregistered: Stage of the parameters whose modules no pattern matches.
      tied: Shape of the parameter that two stages read, the only one that may cross.
      update_rounds: The fewest tasks that the optimizer's update needs on each submesh.
    """

    name: str
    model: nn.Module
    optimizer: optax.GradientTransformation
    stages: Mapping[str, int]
    loop: tuple[str, ...]
    make_batch: Callable[[int, int], Any]
    loss: Callable | None = None
    reduction: str | None = "mean"
    has_aux: bool = False
    unregistered: Mapping[str, int] = field(default_factory=dict)
    tied: tuple[int, ...] | None = None
    update_rounds: int = 1

    @property
    def stage_count(self) -> int:
        return max(self.stages.values()) + 1

    @property
    def loss_fn(self):
        """The `loss_fn` to pass to `parallelize_step`."""
        return self.loss and functools.partial(self.loss, self.model)

    def batches(self, rows, steps):
        return [self.make_batch(rows, seed) for seed in range(steps)]


# ---------------------------------------------------------------- where stages lie


@dataclass(frozen=True)
class Layout:
    """Device positions of each stage, and the shape of its ("x", "y") mesh."""

    devices: tuple[tuple[int, ...], ...]
    shape: tuple[int, int]

    def meshes(self):
        return [
            TaskMesh(devices=devices, axis_names=("x", "y"), axis_sizes=self.shape)
            for devices in self.devices
        ]


def wide(stages, shape=None, total=8):
    """All devices, in contiguous runs of equal size; rows go over them unless `shape` says so."""
    size = total // stages
    runs = tuple(tuple(range(i * size, (i + 1) * size)) for i in range(stages))
    return Layout(runs, shape or (size, 1))


def apart(stages, total=8):
    """One device for each stage, as far apart as they can be."""
    return Layout(tuple((i * total // stages,) for i in range(stages)), (1, 1))


def on_one(stages, devices):
    """Every stage on the same devices."""
    return Layout((tuple(devices),) * stages, (len(devices), 1))


def register(case, layout):
    """Registers the tasks of a case, and only them."""
    clear_tasks()
    meshes = layout.meshes()
    for pattern, stage in case.stages.items():
        register_task(pattern, task=Task(mesh=meshes[stage], logical_axes=LOGICAL_AXES))


def build(case, layout, rows, microbatches=1, **options):
    """Registers and builds a case for global batches of `rows` rows.

    Returns:
      What `parallelize_step` returns.
    """
    register(case, layout)
    if "local_batch" not in options:
        options["global_batch"] = case.make_batch(rows, 0)
    return parallelize_step(
        case.model,
        case.optimizer,
        loss_fn=case.loss_fn,
        num_microbatches=microbatches,
        reduction=case.reduction,
        has_aux=case.has_aux,
        **options,
    )


# ---------------------------------------------------------------- batches


def _rows(features, classes, rows, seed):
    random = np.random.default_rng(seed)
    return {
        "inputs": random.normal(size=(rows, features)).astype(np.float32),
        "labels": random.integers(classes, size=rows).astype(np.int32),
    }


def _half_padded_rows(features, classes, rows, seed):
    """The second half of the rows is padding: whole microbatches, for any even number of them."""
    weights = np.random.default_rng(seed + 1000).integers(0, 2, size=rows).astype(np.float32)
    weights[0], weights[rows // 2 :] = 1, 0
    return _rows(features, classes, rows, seed) | {"weights": weights}


def _tokens(names, vocabulary, length, rows, seed):
    random = np.random.default_rng(seed)
    return {
        name: random.integers(vocabulary, size=(rows, length)).astype(np.int32) for name in names
    }


def _half_padded_tokens(vocabulary, length, rows, seed):
    """Ragged sequences, then a half of all padding."""
    lengths = np.random.default_rng(seed + 1000).integers(1, length + 1, size=(rows, 1))
    lengths[rows // 2 :] = 0
    mask = (np.arange(length) < lengths).astype(np.float32)
    return _tokens(("tokens", "labels"), vocabulary, length, rows, seed) | {"mask": mask}


def _codes(features, rows, seed):
    """Small integers, different in each row, as inputs and as labels."""
    codes = (np.arange(rows) + 3 * seed + 1).astype(np.float32)
    inputs = np.repeat(codes[:, None], features, axis=1)
    return {"inputs": inputs, "labels": codes}


# ---------------------------------------------------------------- losses


_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def _label_loss(model, params, batch, summed=False):
    losses = _cross_entropy(model.apply(params, batch), batch["labels"])
    return losses.sum() if summed else losses.mean()


def _weighted_label_loss(model, params, batch):
    losses = _cross_entropy(model.apply(params, batch), batch["labels"])
    return Weighted((losses * batch["weights"]).sum(), batch["weights"].sum())


def _label_loss_with_metrics(model, params, batch):
    logits = model.apply(params, batch)
    largest = logits.max(axis=-1)
    low = batch["labels"] < 8
    metrics = {
        "largest": largest.mean(),
        "largest_of_low_labels": Weighted((largest * low).sum(), low.sum()),
    }
    return _cross_entropy(logits, batch["labels"]).mean(), metrics


def _l2_loss(model, params, batch):
    penalty = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))
    return _label_loss(model, params, batch) + 1e-2 * penalty


def _auxiliary_loss(model, params, batch):
    logits, balance = model.apply(params, batch)
    return _cross_entropy(logits, batch["labels"]).mean() + 0.1 * balance.mean()


def _token_loss(model, params, batch):
    logits = model.apply(params, batch)
    return _cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]).mean()


def _masked_token_loss(model, params, batch):
    losses = _cross_entropy(model.apply(params, batch), batch["labels"])
    return Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())


def _echo_loss(model, params, batch):
    echoed = model.apply(params, batch)
    return (echoed * batch["labels"][:, None]).sum() / echoed.shape[-1]


# ---------------------------------------------------------------- cases


def _chain(stages):
    """The tasks of a linear pipeline."""
    last = stages - 1
    forward = [f"F{i}" for i in range(last)]
    backward = [f"B{i}" for i in reversed(range(last))]
    return (*forward, f"FB{last}", *backward)


# There and back: the second submesh is in the middle, the first at both ends.
_ROUND_TRIP = ("F0", "F1", "FB0", "B1", "B0")


def mlp(layers_per_stage, reduction="mean", optimizer=None, name="mlp"):
    """A 16-wide Mlp cut into stages of the given numbers of layers.

    Args:
      layers_per_stage: For each stage, how many layers.
      reduction: "mean", "sum" or "weighted".
      optimizer: SGD with rate 1 by default, whose update is the gradient itself.
      name: The case's name.
    """
    stages = {
        f"layer_{sum(layers_per_stage[:stage]) + i}": stage
        for stage, layers in enumerate(layers_per_stage)
        for i in range(layers)
    }
    losses = {
        "mean": _label_loss,
        "sum": functools.partial(_label_loss, summed=True),
        "weighted": _weighted_label_loss,
    }
    make_batch = _half_padded_rows if reduction == "weighted" else _rows
    return Case(
        name=name,
        model=models.Mlp((16,) * len(stages), residual=len(stages) > 4),
        # The gradient of a sum grows with the rows: a rate of 1 would leave the tame region.
        optimizer=optimizer or optax.sgd(1.0 if reduction != "sum" else 1 / 32),
        stages=stages,
        loop=_chain(len(layers_per_stage)),
        make_batch=functools.partial(make_batch, 16, 16),
        loss=losses[reduction],
        reduction=None if reduction == "weighted" else reduction,
    )


def _ragged(stage_of_layer):
    return Case(
        name=f"ragged_{max(stage_of_layer) + 1}",
        model=models.Mlp((13, 5, 3), ragged=True),
        optimizer=optax.sgd(1.0),
        stages={f"layer_{i}": stage for i, stage in enumerate(stage_of_layer)},
        loop=_chain(max(stage_of_layer) + 1),
        make_batch=functools.partial(_rows, 7, 3),
        loss=_label_loss,
    )


def _transformer(blocks):
    # Adam divides by the gradient's size; eps keeps rounding in tiny gradients from mattering.
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))
    return Case(
        name=f"transformer_{blocks}",
        model=models.Transformer(blocks),
        optimizer=optimizer,
        stages={"embed": 0} | {f"block_{i}": i for i in range(blocks)},
        loop=_chain(blocks),
        make_batch=functools.partial(_tokens, ("tokens",), 64, 8),
        loss=_token_loss,
        unregistered={"position": 0, "final_norm": blocks - 1},
        tied=(64, 16),
        update_rounds=2,
    )


def _encoder_decoder(blocks):
    encoders = {f"encoder_{i}": i for i in range(blocks)}
    decoders = {f"decoder_{i}": blocks + i for i in range(blocks)}
    embeds = {"source_embed": 0, "target_embed": blocks, "head": 2 * blocks - 1}
    return Case(
        name=f"encoder_decoder_{2 * blocks}",
        model=models.EncoderDecoder(blocks),
        optimizer=optax.sgd(0.1),
        stages=encoders | decoders | embeds,
        loop=_chain(2 * blocks),
        make_batch=functools.partial(_tokens, ("source", "tokens"), 64, 8),
        loss=_token_loss,
    )


def echo(widths):
    """A pipeline that hands codes of the rows to labels with the same codes, exactly.

    With weights of one, the loss of a step is the sum of the squared codes, and the gradient of a
    weight entry is that over the width; rows of different microbatches that met would make both
    smaller. With powers of two as widths it is exact.

    Args:
      widths: Floats in a row of each stage's output, starting with those of the batch.
    """
    return Case(
        name="echo",
        model=models.Echo(widths),
        optimizer=optax.sgd(1.0),
        stages={f"layer_{i}": i for i in range(len(widths))},
        loop=_chain(len(widths)),
        make_batch=functools.partial(_codes, widths[0]),
        loss=_echo_loss,
        reduction="sum",
    )


def _all_cases():
    two = mlp([1, 1])
    yield two
    yield mlp([2, 2], "sum", name="sum")
    yield mlp([2, 2], "weighted", name="weighted")
    yield replace(two, name="metrics", loss=_label_loss_with_metrics, has_aux=True)
    yield mlp([1, 3, 2, 1], name="uneven")
    yield mlp([6, 6, 6, 6], name="deep", optimizer=optax.sgd(0.005))
    yield _ragged([0, 1, 1])
    yield _ragged([0, 1, 2])
    yield replace(two, name="l2", loss=_l2_loss, optimizer=optax.sgd(0.5, momentum=0.9))
    yield replace(
        two,
        name="auxiliary",
        model=models.Auxiliary(),
        stages=two.stages | {"gate": 0},
        loss=_auxiliary_loss,
    )
    yield replace(
        mlp([1, 1, 1]),
        name="revisited",
        stages={"layer_0": 0, "layer_1": 1, "layer_2": 0},
        loop=_ROUND_TRIP,
    )
    yield replace(
        two,
        name="prefixes",
        model=models.Mlp((16,) * 4, numbers=(0, 1, 10, 11)),
        stages={"layer_0": 0, "layer_1": 0, "layer_10": 1, "layer_11": 1},
    )
    yield replace(
        two,
        name="multi_steps",
        optimizer=optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
    )
    yield replace(
        two,
        name="apply_if_finite",
        optimizer=optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), 3),
        update_rounds=2,
    )
    yield _transformer(2)
    yield _transformer(4)
    yield replace(
        _transformer(2),
        name="masked",
        loss=_masked_token_loss,
        make_batch=functools.partial(_half_padded_tokens, 64, 8),
        reduction=None,
    )
    yield replace(
        _transformer(2),
        name="head_on_first",
        model=models.UntiedHead(2),
        stages={"embed": 0, "block_0": 1, "block_1": 1, "head": 0},
        loop=_ROUND_TRIP,
        unregistered={},
        tied=None,
    )
    yield _encoder_decoder(1)
    yield _encoder_decoder(2)


CASES = {case.name: case for case in _all_cases()}
