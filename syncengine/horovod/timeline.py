"""Horovod's timeline: a trace of all ranks, in one file for ui.perfetto.dev. docs/tracing.md describes it."""

from __future__ import annotations

import os
from pathlib import Path

from syncengine.errors import InvalidUsage
from syncengine.tracing.session import begin, end


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records what happens on this rank, until `stop_timeline` or the process's end; call it on every rank.

    Each rank writes to the folder `file_path`.rings; the last rank that stops makes `file_path` of it, by the package
    perfetto. Raises InvalidUsage before init(), if there is a timeline already, if it can't be written, and for
    `mark_cycles`.
    """
    if mark_cycles:
        raise InvalidUsage("start_timeline(mark_cycles=True): this engine has no cycles; leave it out")
    begin(f"{os.fspath(file_path)}.rings", merged=Path(file_path))


def stop_timeline() -> None:
    """Ends this rank's part of the timeline. Does nothing without one."""
    end()


def follow_variable() -> None:
    """Starts the timeline that HOROVOD_TIMELINE names; "DYNAMIC" is for start_timeline() later."""
    path = os.environ.pop("HOROVOD_TIMELINE", "")  # once: init() may be called again
    if path and path != "DYNAMIC":
        start_timeline(path)
