"""The common part of the command lines of benchmarks of models."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import output


def parser(name: str, docstring: str, models: Sequence[str], engines: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of ``benchmarks.name``; `--worker` marks the processes that it starts. `engines` may be empty."""
    made = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=docstring.split("\n")[0])
    made.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    made.add_argument("--models", nargs="+", choices=tuple(models), default=tuple(models))
    if engines:
        made.add_argument("--engines", nargs="+", choices=engines, default=engines)
    made.add_argument("--out", type=Path, help=f"result file; default benchmarks/results/{name}-...json")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def parse(made: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parses the command line. The result file is named after benchmark and ranks, if none is given."""
    options = made.parse_args(argv)
    options.out = options.out or output.RESULTS / f"{made.prog.partition('.')[2]}-{options.ranks}ranks.json"
    return options
