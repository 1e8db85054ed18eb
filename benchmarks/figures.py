"""Measures the tables of README.md and docs/ anew, and fills them: `make figures`.

python -m benchmarks.figures          69 minutes on a quiet machine of two cores
python -m benchmarks.figures --ages   how old each table is, and measures nothing

Measure on a clean checkout of a commit of main, and commit the results next: other results are refused.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import readme
from benchmarks.support.output import commit, round_trip, said
from benchmarks.support.ranks import REPOSITORY

# Benchmark, options, and minutes that it takes on a quiet machine of two cores.
COMMANDS = (
    ("all_reduce", ["--launcher", "openmpi"], 3),
    ("all_reduce", ["--launcher", "mpich"], 2),
    ("train_step", ["--pairs", "40"], 7),
    ("memory", ["--repeats", "2"], 14),
    ("sharded", ["--rounds", "30"], 9),
    ("sharded_memory", [], 11),
    ("sharded_memory", ["--ranks", "4", "--models", "mlp67", "--engines", "today", "sharded", "--steps", "4"], 4),
    ("micro_batches", [], 9),
    ("elastic", [], 7),
    ("replicate", [], 3),
)
LIMIT = 75 * 60  # seconds for all of them
MOST_BUSY, LOOK = 0.05, 10.0  # the part of the processors' time that others may use, in so many seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks, unless the checkout or the machine is not fit for it."""
    parser = argparse.ArgumentParser(prog="benchmarks.figures", description=__doc__.split("\n")[0])
    parser.add_argument("--ages", action="store_true", help="say how old each table is, and measure nothing")
    if parser.parse_args(argv).ages:
        print(ages())
        return 0
    try:
        readme.check_commit(commit(), "this checkout")
    except readme.RefusedError as why:
        sys.exit(f"no figures: {why}")
    if (busy := others()) > MOST_BUSY:
        sys.exit(f"no figures: other processes use {busy:.0%} of the processors' time, and {MOST_BUSY:.0%} are allowed")
    core_to_core = (round_trip() or [0, 0])[1]
    print(f"{len(os.sched_getaffinity(0))} cores, {core_to_core} ns from core to core and back", flush=True)
    end = time.monotonic() + LIMIT
    for name, options, minutes in COMMANDS:
        print(f"{name} {' '.join(options)}: {minutes} minutes", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=max(1, end - time.monotonic()))
    code = readme.main([])
    print(ages())
    return code


def others(stat: Path = Path("/proc/stat"), seconds: float = LOOK) -> float:
    """The part of all processors' time that is not idle while this process sleeps."""

    def now() -> tuple[int, int]:
        ticks = [int(word) for word in stat.read_text().split("\n")[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all; idle, and waiting for a disk

    whole, idle = now()
    time.sleep(seconds)
    whole_then, idle_then = now()
    return 1 - (idle_then - idle) / max(1, whole_then - whole)


def ages() -> str:
    """A line for each result file of a table: its commit, when that was made, and how many commits are newer."""
    lines = []
    for name in readme.used():
        try:
            made_at = readme.load(name)["commit"]
        except readme.RefusedError as why:
            lines.append(f"{name:28} {why}")
            continue
        date = said("git", "show", "--no-patch", "--format=%cs", made_at)
        newer = said("git", "rev-list", "--count", f"{made_at}..HEAD")
        lines.append(f"{name:28} {made_at:20} {date or 'unknown'}, {newer or 'unknown'} commits ago")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
