"""scripts/fault-matrix: runs cells of the matrix, a few at once, and remembers what it has run."""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from support.faults import table
from support.faults.cells import KINDS, LAUNCHERS, MOMENTS, Cell, all_cells, covering_set
from support.faults.contract import broken_promises
from support.faults.job import Ended, run_cell
from support.faults.launchers import why_unavailable
from support.faults.limits import excused_promises
from support.host_lab import open_hosts
from support.slurm_lab import open_slurm

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: The command line without the command's name; by default the process's own.

    Returns:
      0 if every cell holds, else 1.
    """
    options = _parser().parse_args(arguments)
    if options.table:
        print(table.text())
        return 0
    cells = covering_set() if options.covering else all_cells()
    cells = [cell for cell in cells if _is_selected(cell, options)]
    if options.list:
        print("\n".join(map(str, cells)))
        return 0
    with contextlib.ExitStack() as stack:
        for launcher in {cell.launcher: None for cell in cells}:
            reason = why_unavailable(launcher) or (launcher.plugin and _open_slurm(stack))
            if reason:
                print(f"left out: {launcher.name}: {reason}")
                cells = [cell for cell in cells if cell.launcher != launcher]
        return _run(cells, options)


def _open_slurm(stack) -> str:
    """Starts a SLURM unless there is one; returns why there cannot be one."""
    if os.environ.get("SLURM_CONF"):
        return ""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))
    folders = [Path(folder) / name for name in ("hosts", "slurm")]
    for each in folders:
        each.mkdir()
    try:
        hosts = stack.enter_context(open_hosts(folders[0]))
        stack.enter_context(open_slurm(folders[1], hosts))
    except OSError as exc:
        return str(exc)
    return ""


def _run(cells, options) -> int:
    done = {} if options.again else _read(options.results)
    todo = [cell for cell in cells if str(cell) not in done]
    print(f"{len(cells)} cells, {len(cells) - len(todo)} of them in {options.results} already")
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool, open(options.results, "a") as results:
        futures = {pool.submit(run_cell, cell): cell for cell in todo}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                row = _row(futures[future], future.result())
                results.write(json.dumps(row) + "\n")
                results.flush()
                done[row["cell"]] = row
                print(f"{number}/{len(todo)} {_line(row)}", flush=True)
                if row["broken"] and options.verbose:
                    print(row["output"], flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"{time.monotonic() - started:.0f} s")
    rows = [done[str(cell)] for cell in cells]
    _print_counts(rows, cells)
    return int(any(row["broken"] for row in rows))


def _row(cell: Cell, ended: Ended) -> dict:
    broken = broken_promises(cell, ended)
    excused = excused_promises(cell)
    return {
        "cell": str(cell),
        "code": ended.code,
        "seconds": ended.seconds,
        "wall": ended.wall,
        "broken": {name: text for name, text in broken.items() if name not in excused},
        "excused": {name: text for name, text in broken.items() if name in excused},
        "output": ended.output if broken else "",
    }


def _line(row):
    problems = "; ".join(f"{name}: {text}" for name, text in row["broken"].items())
    known = "; ".join(f"({name}: {text})" for name, text in row["excused"].items())
    after = "" if row["seconds"] is None else f"{row['seconds']:.1f} s after the fault, "
    end = f"code {row['code']}, {after}{row['wall']:.1f} s in all"
    return f"{row['cell']}: {end}: {problems or known or 'ok'}"


def _print_counts(rows, cells: Iterable[Cell]):
    """How many cells hold, by kind and launcher."""
    held, total = Counter(), Counter()
    for row, cell in zip(rows, cells, strict=True):
        place = cell.kind.name, cell.launcher.name
        total[place] += 1
        held[place] += not row["broken"]
    print(f"{'':12}" + "".join(f"{launcher.name:>15}" for launcher in LAUNCHERS))
    for kind in KINDS:
        places = [(kind.name, launcher.name) for launcher in LAUNCHERS]
        counts = (f"{held[place]}/{total[place]}" if total[place] else "-" for place in places)
        print(f"{kind.name:12}" + "".join(f"{count:>15}" for count in counts))


def _is_selected(cell: Cell, options) -> bool:
    values = {
        "kind": cell.kind.name,
        "moment": cell.moment,
        "launcher": cell.launcher.name,
        "ranks": cell.place.ranks,
        "rank": cell.place.rank,
    }
    chosen = vars(options)
    return all(not chosen[name] or value in chosen[name] for name, value in values.items())


def _read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    return {row["cell"]: row for row in rows}


def _parser():
    parser = argparse.ArgumentParser(
        prog="fault-matrix",
        description="Start jobs, hit one rank of each by a fault, and check how they end. "
        "The whole matrix takes a night; a second call goes on where the first was stopped. "
        "Options that filter may be given several times.",
    )
    add = parser.add_argument
    add("--kind", action="append", choices=[kind.name for kind in KINDS])
    add("--moment", action="append", choices=MOMENTS)
    add("--launcher", action="append", choices=[launcher.name for launcher in LAUNCHERS])
    add("--ranks", action="append", type=int, choices=(2, 4), help="how many there are")
    add("--rank", action="append", type=int, choices=range(4), help="the one that fails")
    add("--covering", action="store_true", help="only the cells that the tests run")
    add("--jobs", type=int, default=2, metavar="N", help="how many at once (default: 2)")
    add("--results", type=Path, default=Path("fault-matrix.jsonl"), metavar="FILE")
    add("--again", action="store_true", help="also run what FILE has a result of")
    add("--verbose", action="store_true", help="show the output of jobs that end wrongly")
    add("--list", action="store_true", help="show which cells would be run, and run none")
    add("--table", action="store_true", help="print the table of docs/faults.md")
    return parser
