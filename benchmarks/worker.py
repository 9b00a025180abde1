"""One measurement: trains eight dense layers one way and prints a line of JSON.

Ways: `pipeline` (under mmrun, or in one process), and the `plain` jax.jit step on one device, with
(`plain-microbatched`) and without microbatching.
"""

import argparse
import json
import statistics
import time

LAYERS, BATCH, MICROBATCHES, STAGES = 8, 256, 8, 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["pipeline", "plain", "plain-microbatched"])
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    run = measure_pipeline if options.way == "pipeline" else measure_plain
    row = run(options)
    if row is not None:
        print("RESULT " + json.dumps(row), flush=True)


def make_model(width):
    from flax import linen as nn

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in range(LAYERS):
                x = nn.relu(nn.Dense(width, name=f"layer_{layer}")(x))
            return x

    return Layers()


def loss_of(model):
    return lambda params, batch: ((model.apply(params, batch["x"]) - batch["y"]) ** 2).mean()


def make_batch(width):
    import numpy as np

    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((BATCH, width)).astype(np.float32) for name in ("x", "y")}


def timed(step, state, steps):
    """Median seconds of a step, each waited for."""
    import jax

    seconds = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        loss, state = step(state)
        jax.block_until_ready((loss, state))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:]), state


def measure_pipeline(options):
    from multimesh import init

    init(cpus=STAGES)
    import jax
    import optax

    from multimesh.jax import Task, TaskMesh, register_task
    from multimesh.jax.flax import parallelize_step

    def place(name, backprop):
        stage = int(name) * STAGES // LAYERS
        return Task(TaskMesh((stage,), ("x",), (1,)), name=f"stage_{stage}")

    register_task(r"layer_(\d+)", callback=place)
    model, batch = make_model(options.width), make_batch(options.width)
    step_fn, state, _, prepare_batch = parallelize_step(
        model,
        optax.sgd(1e-3),
        local_batch=batch,
        loss_fn=loss_of(model),
        init_fn=lambda key, batch: model.init(key, batch["x"]),
        num_microbatches=MICROBATCHES,
        reduction="mean",
    )
    placed = prepare_batch(batch)
    seconds, state = timed(lambda state: step_fn(state, placed), state, options.steps)
    samples = []
    for _ in range(5):
        tasks, state = step_fn.measure(state, placed)
        samples.append(tasks)
    tasks = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    if jax.process_index() != 0:
        return None
    plan = step_fn.plan
    runs = [
        sum(plan.tasks[action.task].submesh == stage for action in plan.timeline.total_order)
        for stage in range(STAGES)
    ]
    per_rank = max(runs) if jax.process_count() > 1 else sum(runs)
    ideal = plan.predict(tasks).makespan
    arguments = max(len(task.inputs) for task in plan.tasks)
    return {
        "seconds": seconds,
        "ideal": ideal,
        "task_runs": per_rank,
        "overhead_us": (seconds - ideal) / per_rank * 1e6,
        "most_arguments": arguments,
        "tasks_us": {name: round(value * 1e6) for name, value in tasks.items()},
    }


def measure_plain(options):
    import jax
    import jax.numpy as jnp
    import optax

    model, batch = make_model(options.width), make_batch(options.width)
    optimizer, loss = optax.sgd(1e-3), loss_of(model)
    params = model.init(jax.random.key(42), batch["x"])
    microbatches = MICROBATCHES if options.way == "plain-microbatched" else 1

    def gradient(params, batch):
        if microbatches == 1:
            return jax.value_and_grad(loss)(params, batch)
        stacked = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)
        zeros = (0.0, jax.tree.map(jnp.zeros_like, params))

        def body(carry, rows):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, rows)), None

        total, _ = jax.lax.scan(body, zeros, stacked)
        return jax.tree.map(lambda a: a / microbatches, total)

    def step(state, batch):
        params, optimizer_state = state
        value, grads = gradient(params, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return value, (optax.apply_updates(params, updates), optimizer_state)

    jitted = jax.jit(step, donate_argnums=0)
    placed = jax.device_put(batch)
    state = (params, optimizer.init(params))
    seconds, _ = timed(lambda state: jitted(state, placed), state, options.steps)
    return {"seconds": seconds}


if __name__ == "__main__":
    main()
