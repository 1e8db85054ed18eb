"""`syncengine bench`: measures collectives between these ranks, and prints them in the columns of nccl-tests."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import syncengine.communicator as default
from syncengine.bench.collectives import COLLECTIVES
from syncengine.bench.measure import measure, open_gloo
from syncengine.bench.options import add_options, check, sizes
from syncengine.bench.report import Table, as_json
from syncengine.errors import InvalidUsage, SyncError
from syncengine.launch import find_launch
from syncengine.launch.local import check_ranks, run_local_ranks

_EXAMINE = "see what `syncengine doctor` finds when it is started in the same way"


def add_bench(commands: Any) -> None:
    """Adds the command ``syncengine bench`` to those of the parser."""
    parser = commands.add_parser(
        "bench",
        help="how fast collectives are between these ranks",
        description="Measures collectives between the ranks of a launch (torchrun, mpirun, srun), or between --ranks "
        "processes on this machine. Exit code: 0 fine, 1 wrong results, 2 it can't run.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures, or starts ranks that measure. Returns the exit code."""
    check(options)
    launch = find_launch()
    if launch.kind == "single":
        if options.ranks is None:
            raise InvalidUsage(
                "this is one process, and there is nothing to measure: give --ranks N, or start it by a launcher "
                "(torchrun --nproc-per-node N -m syncengine bench)"
            )
        return run_local_ranks(options.ranks, arguments)
    check_ranks(options.ranks, launch)
    try:
        return _run_rank(options)
    except SyncError:
        raise
    except (MemoryError, OSError, RuntimeError) as error:  # torch's and Gloo's
        text = (str(error).splitlines() or [type(error).__name__])[0]
        short = isinstance(error, MemoryError) or "allocate memory" in text
        raise InvalidUsage(f"{text}: {'give a smaller -e' if short else _EXAMINE}") from error


def _run_rank(options: argparse.Namespace) -> int:
    names = COLLECTIVES if options.collective == "all" else (options.collective,)
    by_torch = options.compare or "all_to_all" in names
    communicator = default.init(timeout=options.timeout, torch_group=by_torch)
    gloo = open_gloo(communicator, options.timeout) if options.compare else None
    first = communicator.rank == 0
    rows: list[dict[str, Any]] = []
    for name in names:
        table = Table(options, communicator, name) if first and not options.json else None
        for size in sizes(options) if name != "barrier" else [0]:
            row = measure(name, size, options, communicator, gloo)
            rows.append(row)
            if table is not None:
                table.add(row)
        if table is not None:
            table.end()
    if first and options.json:
        print(json.dumps(as_json(options, communicator, rows), indent=2), flush=True)
    wrong = any(row["wrong"] for row in rows) or any(row.get("gloo", {}).get("wrong") for row in rows)
    default.shutdown()
    return int(wrong and first)  # the launcher reports one rank's failure, not all
