"""`python -m benchmarks`: the pipeline beside plain JAX, interleaved in one run.

Prints a table and writes JSON. Every round measures each way once, in a process of its own, so
that a busy machine slows all of them alike; the table shows medians over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, "-m", "benchmarks.worker"]
MMRUN = [sys.executable, str(ROOT / "scripts" / "mmrun")]


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
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    print(f"written to {options.json}")


def measure(width, steps, rounds):
    """Runs every way once a round; returns the medians by way."""
    samples = {name: [] for name in ways()}
    for _ in range(rounds):
        for name, (prefix, way, cores) in ways().items():
            command = [*prefix, *WORKER, way, "--width", str(width), "--steps", str(steps)]
            samples[name].append(run(command, cores))
    return {name: combine(rows) for name, rows in samples.items()}


def run(command, cores):
    """Runs a worker on the first cores of this process; returns what it measured."""
    allowed = set(sorted(os.sched_getaffinity(0))[:cores])
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    line = next(line for line in done.stdout.splitlines() if "RESULT " in line)
    return json.loads(line.split("RESULT ", 1)[1])


def combine(rows):
    """Medians of the numbers of several rounds."""
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    combined = {key: statistics.median(row[key] for row in rows) for key in numbers}
    if "ideal" in combined:  # of ratios, not the ratio of medians: rounds differ in load
        combined["ratio"] = statistics.median(row["seconds"] / row["ideal"] for row in rows)
        combined["tasks_us"] = rows[-1]["tasks_us"]
    return combined


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
