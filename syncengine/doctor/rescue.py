"""`syncengine doctor` where syncengine can't be imported, which it is there to explain."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from syncengine.doctor import DESCRIPTION, add_options, run


def examine_instead(error: Exception) -> None:
    """If this process is to run `syncengine doctor`: runs it with what can be imported, and exits. Else returns."""
    arguments = _arguments_of_doctor(sys.argv[0], sys.orig_argv)
    if arguments is None:
        return
    parser = argparse.ArgumentParser(prog="syncengine doctor", description=DESCRIPTION)
    add_options(parser)
    options = parser.parse_args(arguments)
    options.import_error = str(error)
    sys.modules["syncengine._C"] = None  # type: ignore[assignment] # nobody tries again: it may end the process
    sys.exit(run(options, ["doctor", *arguments]))


def _arguments_of_doctor(program: str, command: list[str]) -> list[str] | None:
    """What comes behind `doctor` in a command that runs it, as `python -m syncengine doctor` or by pip's script."""
    if program != "-m" and Path(program).name != "syncengine":
        return None
    for i, word in enumerate(command[1:], 1):
        if Path(word).name == "syncengine" and command[i + 1 : i + 2] == ["doctor"]:
            return command[i + 2 :]
    return None
