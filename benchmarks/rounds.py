"""What all benchmarks share: ways are measured in turn, each in processes of its own."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MMRUN = [sys.executable, str(ROOT / "scripts" / "mmrun")]


def in_rounds(count, ways, measure):
    """Measures every way once a round, so that a busy machine slows all of them alike.

    Args:
      count: How many rounds.
      ways: Name -> arguments of `measure`.
      measure: Returns the numbers of one measurement, by name.

    Returns:
      The medians over rounds, by way.
    """
    samples = {name: [] for name in ways}
    for _ in range(count):
        for name, arguments in ways.items():
            samples[name].append(measure(*arguments))
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


def write(results, path):
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    print(f"written to {path}")
