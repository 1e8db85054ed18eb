"""Commands where syncengine can't be imported: `doctor` explains why, `build` compiles it, others show the error."""

import argparse
import sys
from pathlib import Path

from syncengine._build import build_own
from syncengine.doctor import DESCRIPTION, add_options, run


def examine_instead(error: Exception) -> None:
    """Runs this process's command, with the modules that can be imported. Returns if it is no command of syncengine."""
    command = _arguments_of_command(sys.argv[0], sys.orig_argv)
    if command is None:
        return
    if command == ["build"]:
        sys.exit(build_own())
    if command[:1] != ["doctor"]:
        print(f"syncengine can't be imported: {type(error).__name__}: {error}", file=sys.stderr)
        print("`syncengine doctor` says more; it needs neither PyTorch nor the extension", file=sys.stderr, flush=True)
        sys.exit(2)
    arguments = command[1:]
    parser = argparse.ArgumentParser(prog="syncengine doctor", description=DESCRIPTION)
    add_options(parser)
    options = parser.parse_args(arguments)
    options.import_error = str(error)
    sys.modules["syncengine._C"] = None  # type: ignore[assignment] # nobody tries again: it may end the process
    sys.exit(run(options, ["doctor", *arguments]))


def _arguments_of_command(program: str, command: list[str]) -> list[str] | None:
    """The words behind `syncengine` in `python -m syncengine doctor` or in a call of pip's script; otherwise None."""
    if program == "-m" or Path(program).name == "syncengine":
        for i, word in enumerate(command[1:], 1):
            if Path(word).name == "syncengine":
                return command[i + 1 :]
    return None
