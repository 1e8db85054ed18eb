"""Runs Python programs in processes that have imported torch, which takes seconds otherwise, but not syncengine."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pool import RankPool

Result = subprocess.CompletedProcess


def run_programs(
    programs: RankPool,
    arguments: Sequence[str],
    environs: Sequence[dict[str, str]],
    timeout: float = 240.0,
    prepare: Callable[[int], None] | None = None,
) -> list[Result]:
    """`python *arguments` (a script, or -m and a module) at the same time in each of these environments, to the ends.

    In the first folder of its PYTHONPATH. `prepare`: called before, in each process, with the place of its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (_run, list(arguments), list(environs), folder, prepare)
        with programs.spawn_ranks(*call, world=len(environs), settings=None) as processes:
            codes = [process.exit_code(timeout) for process in processes]
        said = [[Path(folder, f"{rank} {fd}").read_text() for fd in (1, 2)] for rank in range(len(environs))]
    assert None not in codes, said
    return [Result(arguments, code, *texts) for code, texts in zip(codes, said, strict=True)]


def _run(
    arguments: list[str], environs: list[dict[str, str]], folder: str, prepare: Callable[[int], None] | None
) -> None:
    rank = int(os.environ["RANK"])
    for fd in (1, 2):
        with Path(folder, f"{rank} {fd}").open("wb") as output:
            os.dup2(output.fileno(), fd)
    if prepare is not None:
        prepare(rank)
    os.environ.clear()
    os.environ.update(environs[rank])
    places = os.environ["PYTHONPATH"].split(os.pathsep)
    os.chdir(places[0])
    sys.path[:0] = places
    import syncengine_autoload

    syncengine_autoload.load()  # as when torch is imported
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
