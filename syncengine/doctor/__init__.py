"""`syncengine doctor`: finds what could keep ranks from training together, or make them slow, and says what to do."""

import argparse
from collections.abc import Sequence
from typing import Any

DESCRIPTION = (
    "Examines the ranks of a launch, or of --ranks processes on this machine, or this process alone; rank 0 prints one "
    "report. Exit code: 0 fine, 1 findings, 2 training can't run like this. Under torchrun every failure is 1."
)


def add_doctor(commands: Any) -> None:
    """Adds the command ``syncengine doctor`` to the parser's."""
    parser = commands.add_parser(
        "doctor", help="what keeps ranks from training, or slows them", description=DESCRIPTION
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``syncengine doctor`` to the parser."""
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.add_argument("--ranks", type=int, metavar="N", help="without a launcher: start N ranks on this machine")
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="that ranks wait for others; default 30"
    )


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Examines the ranks. Returns the exit code."""
    from syncengine.doctor.examination import examine

    return examine(options, arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, more than 0")
    return seconds
