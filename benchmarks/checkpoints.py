"""`python -m benchmarks.checkpoints`: a state saved and restored, beside the same bytes by numpy.

Prints a table and writes JSON. Every round measures each way once, in processes of its own; the
table shows medians over rounds. A checkpoint is on the disk when a save ends, so numpy is measured
with and without `fsync`. All is read from the page cache.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rounds import MMRUN, ROOT, in_rounds, run, write

WORKER = [sys.executable, "-m", "benchmarks.checkpoints"]
LEAVES = 32
COLUMNS = {"save": 10, "copy": 16, "restore": 10}  # what was measured -> its width in the table
# Name -> (command in front of the worker, way)
WAYS = {
    "Checkpoints, mmrun -n 2": ([*MMRUN, "-n", "2"], "multimesh"),
    "Checkpoints, one process": ([], "multimesh"),
    "numpy, fsync": ([], "numpy-fsync"),
    "numpy": ([], "numpy"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--way", choices=["multimesh", "numpy-fsync", "numpy"], help="for the worker"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoints.json"
    )
    options = parser.parse_args()
    if options.way:
        work(options)
        return

    def once(prefix, way):
        folder = tempfile.mkdtemp(dir=options.folder)
        size = ["--megabytes", str(options.megabytes), "--folder", folder]
        row = run([*prefix, *WORKER, "--way", way, *size], cores=2)
        shutil.rmtree(folder)
        return row

    results = in_rounds(options.rounds, WAYS, once)
    print(table(options.megabytes, results))
    write(results, options.json)


def table(megabytes, rows):
    """The medians as text."""
    lines = [
        f"\n{megabytes} MB of float32 in {LEAVES} leaves on two stages, two cores, MB/s",
        f"{'':28}{'save':>10}{'returns after':>16}{'restore':>10}",
    ]
    for name, row in rows.items():
        cells = (f"{megabytes / row[key]:{width}.0f}" for key, width in COLUMNS.items())
        lines.append(f"{name:28}{''.join(cells)}")
    return "\n".join(lines)


def work(options):
    """Measures one way and prints a line of JSON, on one rank."""
    measure = measure_multimesh if options.way == "multimesh" else measure_numpy
    row = measure(options)
    if row is not None:
        print("RESULT " + json.dumps(row), flush=True)


def leaf_values(megabytes):
    import numpy as np

    rows = megabytes * 2**20 // LEAVES // 4 // 1024
    random = np.random.default_rng(0)
    return {f"leaf_{i}": random.standard_normal((rows, 1024), np.float32) for i in range(LEAVES)}


def measure_numpy(options):
    import numpy as np

    values = leaf_values(options.megabytes)
    start = time.perf_counter()
    for name, value in values.items():
        with open(options.folder / f"{name}.npy", "wb") as file:
            np.save(file, value)
            if options.way == "numpy-fsync":
                file.flush()
                os.fsync(file.fileno())
    saved = time.perf_counter()
    for name in values:
        np.load(options.folder / f"{name}.npy")
    restored = time.perf_counter()
    return {"save": saved - start, "copy": saved - start, "restore": restored - saved}


def measure_multimesh(options):
    from multimesh import init

    init(cpus=2)
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from multimesh.jax.checkpoint import Checkpoints
    from multimesh.state import without_shards

    def place(index, value):
        device = jax.devices()[index * 2 // LEAVES]
        sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
        if not sharding.addressable_devices:
            return without_shards(value.shape, value.dtype, sharding)
        return jax.device_put(value, sharding)

    values = leaf_values(options.megabytes)
    state = {name: place(index, value) for index, (name, value) in enumerate(values.items())}
    jax.block_until_ready(state)
    with Checkpoints(options.folder) as checkpoints:
        start = time.perf_counter()
        checkpoints.save(0, state)
        copied = time.perf_counter()
        checkpoints.latest()
        saved = time.perf_counter()
        restored, _ = checkpoints.restore(state)
        jax.block_until_ready(restored)
        end = time.perf_counter()
    if jax.process_index() != 0:
        return None
    return {"save": saved - start, "copy": copied - start, "restore": end - saved}


if __name__ == "__main__":
    main()
