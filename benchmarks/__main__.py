"""`python -m benchmarks`: the pipeline beside plain JAX, interleaved in one run.

Prints a table and writes JSON. Every round measures each way once, in a process of its own, so
that a busy machine slows all of them alike; the table shows medians over rounds.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.rounds import MMRUN, ROOT, in_rounds, run, write

WORKER = [sys.executable, "-m", "benchmarks.worker"]


def ways():
    """Name -> (command in front of the worker, way, cores)."""
    return {
        "mmrun -n 2": ([*MMRUN, "-n", "2"], "pipeline", 2),
        "one process, 2 cores": ([], "pipeline", 2),
        "one process, 1 core": ([], "pipeline", 1),
        "jax.jit, 1 core": ([], "plain", 1),
        "jax.jit, 2 cores": ([], "plain", 2),
        "jax.jit microbatched, 1 core": ([], "plain-microbatched", 1),
        "jax.jit microbatched, 2 cores": ([], "plain-microbatched", 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps per measurement at width 1024")
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 32])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "speed.json")
    options = parser.parse_args()
    results = {}
    for width in options.widths:
        steps = options.steps if width >= 256 else options.steps * 5
        rows = measure(width, steps, options.rounds)
        print(table(width, rows))
        results[width] = rows
    write(results, options.json)


def measure(width, steps, rounds):
    """Runs every way once a round; returns the medians by way."""

    def once(prefix, way, cores):
        command = [*prefix, *WORKER, way, "--width", str(width), "--steps", str(steps)]
        return run(command, cores)

    return in_rounds(rounds, ways(), once)


def table(width, rows):
    """The medians as text."""
    plain = rows["jax.jit, 1 core"]["seconds"]
    lines = [
        f"\n8 dense layers of {width}, batch 256, 8 microbatches, float32, SGD",
        f"{'':32}{'ms/step':>9}{'vs jit 1 core':>15}{'x ideal':>9}{'us/task over':>14}{'args':>6}",
    ]
    for name, row in rows.items():
        cells = f"{name:32}{row['seconds'] * 1e3:9.2f}{row['seconds'] / plain:15.2f}"
        if "ratio" in row:
            cells += f"{row['ratio']:9.3f}{row['overhead_us']:14.1f}{row['most_arguments']:6.0f}"
        lines.append(cells)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
