"""`python -m benchmarks.gpt`: the GPT example as a pipeline, beside plain JAX on one device.

Prints a table and writes JSON. Every round measures each way once, in processes of its own; the
table shows medians over rounds. Memory is the largest of all ranks: what parameters and optimizer
take, and the peak of the process, compiling included.
"""

import argparse
import importlib.util
import json
import resource
import sys
from pathlib import Path

from benchmarks.rounds import MMRUN, ROOT, in_rounds, run, write
from benchmarks.worker import timed

WORKER = [sys.executable, "-m", "benchmarks.gpt"]
# Name -> (command in front of the worker, way)
WAYS = {
    "mmrun -n 2": ([*MMRUN, "-n", "2"], "pipeline"),
    "one process": ([], "pipeline"),
    "jax.jit": ([], "plain"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["pipeline", "plain"], help="for the worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpt.json")
    options = parser.parse_args()
    if options.way:
        work(options)
        return

    def once(prefix, way):
        return run([*prefix, *WORKER, "--way", way, "--steps", str(options.steps)], cores=2)

    results = in_rounds(options.rounds, WAYS, once)
    print(table(results))
    write(results, options.json)


def table(rows):
    """The medians as text."""
    plain = rows["jax.jit"]["tokens"]
    lines = [
        "\nexamples/gpt.py, two cores",
        f"{'':16}{'tokens/s':>10}{'vs jit':>8}{'state MB':>10}{'of it':>8}{'peak MB':>9}",
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:16}{row['tokens']:10.0f}{row['tokens'] / plain:8.2f}"
            f"{row['state'] / 1e6:10.2f}{row['share']:8.3f}{row['peak'] / 1e6:9.0f}"
        )
    return "\n".join(lines)


def work(options):
    """Measures one way and prints a line of JSON, on one rank."""
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples" / "gpt.py")
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    sys.argv[1:] = []
    settings = gpt.parse_options()
    text = gpt.Text(gpt.load_text(settings.text))
    model = gpt.GPT(len(text.letters), settings.width, settings.length)
    batch = text.batch(0, settings.rows, settings.length)
    measure = measure_pipeline if options.way == "pipeline" else measure_plain
    seconds, held, whole = measure(gpt, model, batch, settings, options.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ranks = gather((held, peak))
    if ranks is None:
        return
    held, peak = (max(values) for values in zip(*ranks, strict=True))
    tokens = settings.rows * settings.length / seconds
    row = {"tokens": tokens, "state": held, "share": held / whole, "peak": peak}
    print("RESULT " + json.dumps(row), flush=True)


def gather(value):
    """The values of all ranks, on rank 0; None elsewhere."""
    import jax

    if jax.process_count() == 1:
        return [value]
    from mpi4py import MPI

    return MPI.COMM_WORLD.gather(value)


def state_bytes(state):
    """The bytes of a state on this rank, and those of the whole."""
    import jax

    leaves = jax.tree.leaves((state.params, state.opt_state))
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return held, sum(leaf.nbytes for leaf in leaves)


def measure_pipeline(gpt, model, batch, settings, steps):
    import jax

    from multimesh import init
    from multimesh.jax.flax import parallelize_step

    init(cpus=gpt.STAGES)
    gpt.register_stages()
    step_fn, state, _ = parallelize_step(
        model,
        gpt.make_optimizer(settings.steps),
        loss_fn=lambda params, batch, rngs: gpt.loss_of(
            model, params, batch, training=True, rngs=rngs
        ),
        init_fn=lambda key, batch: model.init(key, batch["codes"]),
        global_batch=batch,
        num_microbatches=gpt.MICROBATCHES,
        reduction="mean",
        rngs={"dropout": jax.random.key(1)},
    )
    held, whole = state_bytes(state)
    placed = step_fn.prepare(batch)
    seconds, _ = timed(lambda state: step_fn(state, placed), state, steps)
    return seconds, held, whole


def measure_plain(gpt, model, batch, settings, steps):
    import jax
    from flax.training.train_state import TrainState

    params = jax.jit(model.init)(jax.random.key(42), batch["codes"])
    optimizer = gpt.make_optimizer(settings.steps)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    key = jax.random.key(1)

    def step(state, batch):
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        loss, gradients = jax.value_and_grad(
            lambda params: gpt.loss_of(model, params, batch, training=True, rngs=rngs)
        )(state.params)
        return loss, state.apply_gradients(grads=gradients)

    jitted = jax.jit(step, donate_argnums=0)
    placed = jax.device_put(batch)
    held, whole = state_bytes(state)
    seconds, _ = timed(lambda state: jitted(state, placed), state, steps)
    return seconds, held, whole


if __name__ == "__main__":
    main()
