"""A small GPT that learns to write Python source, trained as a pipeline of four stages.

    mmrun -n 2 python examples/gpt.py       two stages on each of two processes
    mmrun -n 4 python examples/gpt.py       one stage on each of four
    python examples/gpt.py                  the same program in one process

The text is Python's own licence and standard library; `--text FILE` names another. Four CPU devices
run a transformer block each. The first embeds the characters too, and the last uses the same table
as the output layer. Arithmetic is bfloat16, the parameters are float32. The held-out loss is
printed beside that of a bigram model, which sees one character.

A checkpoint is written every `--every` steps, and when the job is told to stop. `--resume` goes on
from the last one, with as many processes as one likes.
"""

import argparse
import pathlib
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from tqdm import tqdm

from multimesh import init, preempted
from multimesh.jax import Task, TaskMesh, prefetch, register_task
from multimesh.jax.checkpoint import Checkpoints
from multimesh.jax.flax import parallelize_eval, parallelize_step

STAGES = 4
MICROBATCHES = 8
HELD_OUT_ROWS = 64
SAMPLE = 300  # characters


class Block(nn.Module):
    """A transformer block: (rows, length, width) -> the same."""

    heads: int

    @nn.compact
    def __call__(self, x, training):
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=jnp.bfloat16)(y, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=not training)(y)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16)(y))
        y = nn.Dense(width, dtype=jnp.bfloat16)(y)
        return x + nn.Dropout(0.1, deterministic=not training)(y)


class GPT(nn.Module):
    """A decoder-only transformer: (rows, length) codes -> (rows, length, vocabulary) logits."""

    vocabulary: int
    width: int
    length: int

    @nn.compact
    def __call__(self, codes, training=False):
        table = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16, name="embed")
        places = self.param("places", nn.initializers.normal(0.02), (self.length, self.width))
        x = table(codes) + places[: codes.shape[1]].astype(jnp.bfloat16)
        for stage in range(STAGES):
            x = Block(heads=max(1, self.width // 32), name=f"block_{stage}")(x, training)
        x = nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)
        return table.attend(x).astype(jnp.float32)  # the same table: tied embeddings


def register_stages():
    """Says where each module runs, by the names of the modules."""

    def place(name, backprop):
        return Task(TaskMesh(devices=(int(name),), axis_names=("rows",), axis_sizes=(1,)))

    register_task(r"block_(\d)", callback=place)
    register_task("embed", task=place("0", backprop=False))


class Text:
    """Characters as codes, divided into what is trained on and what is held out."""

    def __init__(self, text):
        self.letters = sorted(set(text))
        code = {letter: index for index, letter in enumerate(self.letters)}
        codes = np.array([code[letter] for letter in text], np.int32)
        self.train, self.held_out = np.split(codes, [len(codes) * 95 // 100])

    def batch(self, step, rows, length):
        """The batch of a step depends on nothing but its number, so a resumed run sees it too."""
        starts = np.random.default_rng(step).integers(len(self.train) - length, size=rows)
        return _windows(self.train, starts, length)

    def held_out_batch(self, rows, length):
        starts = np.linspace(0, len(self.held_out) - length - 1, rows).astype(int)
        return _windows(self.held_out, starts, length)

    def bigram_loss(self, batch):
        """The loss of counting which character follows which; every pair is seen once more."""
        counts = np.ones((len(self.letters),) * 2)
        np.add.at(counts, (self.train[:-1], self.train[1:]), 1)
        rates = counts / counts.sum(axis=1, keepdims=True)
        return -np.log(rates[batch["codes"], batch["next"]]).mean()


def _windows(codes, starts, length):
    windows = codes[starts[:, None] + np.arange(length + 1)]
    return {"codes": windows[:, :-1], "next": windows[:, 1:]}


def load_text(path):
    """The text of a file, by default of Python itself; its ASCII characters."""
    if path:
        files = [pathlib.Path(path)]
    else:
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        files = [*library.glob("LICENSE*"), *sorted(library.glob("*.py"))]
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return text.encode("ascii", "ignore").decode()


def loss_of(model, params, batch, **options):
    logits = model.apply(params, batch["codes"], **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def make_optimizer(steps):
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(50, steps // 10), steps, 2e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def write(predict, state, text, length):
    """Lets the model go on from a beginning, one character after another."""
    codes = [text.letters.index(letter) for letter in "def " if letter in text.letters] or [0]
    random = np.random.default_rng(0)
    for _ in range(SAMPLE):
        window = np.zeros((1, length), np.int32)
        recent = codes[-length:]
        window[0, : len(recent)] = recent
        logits = predict(state, {"codes": window})[0, len(recent) - 1]
        # The likeliest of the logits with such noise is a sample of their distribution.
        codes.append(int(np.argmax(logits / 0.8 + random.gumbel(size=logits.shape))))
    return "".join(text.letters[code] for code in codes)


def main():
    options = parse_options()
    init(cpus=STAGES)
    register_stages()
    text = Text(load_text(options.text))
    model = GPT(len(text.letters), options.width, options.length)

    def batches(start):
        return (text.batch(n, options.rows, options.length) for n in range(start, options.steps))

    step_fn, state, mesh = parallelize_step(
        model,
        make_optimizer(options.steps),
        loss_fn=lambda params, batch, rngs: loss_of(model, params, batch, training=True, rngs=rngs),
        init_fn=lambda key, batch: model.init(key, batch["codes"]),
        global_batch=text.batch(0, options.rows, options.length),
        num_microbatches=MICROBATCHES,
        reduction="mean",
        rngs={"dropout": jax.random.key(1)},
    )
    held_out = text.held_out_batch(HELD_OUT_ROWS, options.length)
    evaluate = parallelize_eval(
        lambda params, batch: loss_of(model, params, batch),
        state,
        mesh,
        global_batch=held_out,
        num_microbatches=MICROBATCHES,
        reduction="mean",
    )
    with Checkpoints(options.checkpoints) as checkpoints:
        start = checkpoints.latest() if options.resume else None
        if start is not None:
            state, _ = checkpoints.restore(state)
        state = train(options, step_fn, state, batches(start or 0), evaluate, held_out, checkpoints)
    if preempted():
        return
    predict = parallelize_eval(
        lambda params, batch: model.apply(params, batch["codes"]),
        state,
        mesh,
        global_batch={"codes": held_out["codes"][:1]},
    )
    sample = write(predict, state, text, options.length)
    if jax.process_index() == 0:
        print(f"bigram model: held-out loss {text.bigram_loss(held_out):.4f}\n\n{sample}")


def train(options, step_fn, state, batches, evaluate, held_out, checkpoints):
    """Trains on the batches; returns the state."""
    is_leader = jax.process_index() == 0
    done = int(state.step)
    bar = tqdm(total=options.steps, initial=done, unit="step", disable=not is_leader)
    started, first = time.monotonic(), done
    for batch in prefetch(batches, step_fn.prepare):
        loss, state = step_fn(state, batch)
        done += 1
        rate = (done - first) * options.rows * options.length / (time.monotonic() - started)
        bar.set_postfix_str(f"loss {float(loss):.4f}, {rate:.0f} tokens/s")
        bar.update()
        is_last = done == options.steps or preempted()  # on all ranks after the same step
        if done % options.every == 0 or is_last:
            checkpoints.save(done, state)
            held_out_loss = evaluate(state, held_out)
            if is_leader:
                tqdm.write(f"step {done}: loss {float(loss):.6f}, held out {held_out_loss:.6f}")
        if is_last:
            break
    bar.close()
    return state


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", metavar="FILE", help="learn from this (default: Python's standard library)")
    add("--steps", type=int, default=400)
    add("--every", type=int, default=100, help="steps between held-out losses and checkpoints")
    add("--rows", type=int, default=32, help="rows of a batch")
    add("--length", type=int, default=128, help="characters of a row")
    add("--width", type=int, default=128, help="width of the model")
    add("--checkpoints", default="gpt-checkpoints", metavar="FOLDER")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
