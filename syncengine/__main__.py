"""The command `syncengine`, also as `python -m syncengine`."""

import argparse
import sys
from collections.abc import Sequence

import torch

from syncengine import _C, __version__
from syncengine._build import add_build
from syncengine.bench import add_bench
from syncengine.doctor import add_doctor
from syncengine.errors import SyncError
from syncengine.launch.local import add_run
from syncengine.report import add_report
from syncengine.tracing.perfetto import add_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands. Returns its exit code: 2 if it can't run, with the error on stderr."""
    parser = argparse.ArgumentParser(prog="syncengine", description="Gradient synchronization for PyTorch.")
    version = f"syncengine {__version__}, build {_C.build_id}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")
    for add in (add_doctor, add_bench, add_run, add_trace, add_report, add_build):
        add(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    try:
        return int(options.run(options, given))
    except (SyncError, OSError) as error:
        print(f"syncengine {options.command}: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
