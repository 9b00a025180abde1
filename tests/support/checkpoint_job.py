"""A job that goes on from a folder's newest checkpoint, trains some steps, and saves.

    python checkpoint_job.py FOLDER LAYOUT STEPS [--die]

With `--die`, the last rank is killed while it writes.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import optax

from multimesh import init
from multimesh.checkpoint import handler
from multimesh.jax.checkpoint import Checkpoints
from support import cases

ROWS = 8
CASE = cases.mlp([1, 1], optimizer=optax.adamw(1e-2, eps=1e-3))
LAYOUTS = {
    "two stages": cases.wide(2),
    "two narrow stages": cases.apart(2),
    "one stage": cases.on_one(2, range(8)),
    "a mesh of 2 x 2": cases.wide(2, (2, 2)),
}


def main(folder, layout, steps, *options):
    init(cpus=8)
    step_fn, state, _ = cases.build(CASE, LAYOUTS[layout], ROWS, 2)
    with Checkpoints(folder) as checkpoints:
        done = 0
        if checkpoints.latest() is not None:
            state, extra = checkpoints.restore(state)
            done = extra["steps"]
        if "--die" in options:
            die_while_writing()
        for batch in CASE.batches(ROWS, done + int(steps))[done:]:
            _, state = step_fn(state, batch)
        checkpoints.save(done + int(steps), state, {"steps": done + int(steps)})


def die_while_writing():
    write = handler._write

    async def write_a_part(owned, infos, args):
        if jax.process_index() < jax.process_count() - 1:
            return await write(owned, infos, args)
        await write(owned[: len(owned) // 2], infos[: len(owned) // 2], args[: len(owned) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    handler._write = write_a_part


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
