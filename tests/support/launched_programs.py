"""Programs of one launch, each as `python -m` runs it: ranks take longer to start than these to end.

    launched_programs.py FOLDER '[["module", "argument", ...], ...]'

Each rank leaves in the folder what each program has written to stdout, and its exit code. The last program's engine is
left to the end of the process.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import syncengine


def run(module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of one program."""
    sys.argv = [module, *arguments]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
    return code, said.getvalue()


if __name__ == "__main__":
    folder, programs = Path(sys.argv[1]), json.loads(sys.argv[2])
    outcomes = []
    for program in programs:
        syncengine.shutdown()
        outcomes.append(run(*program))
    (folder / f"{os.getpid()}.json").write_text(json.dumps(outcomes))
