"""Begins and ends a trace on this rank; the last rank that ends makes one file of all ranks' events."""

import contextlib
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from syncengine._C import start_trace, stop_trace, trace_now, trace_path
from syncengine.errors import InvalidUsage
from syncengine.lines import print_line
from syncengine.process_end import at_end
from syncengine.tracing.events import is_complete
from syncengine.tracing.perfetto import write

EVENTS = 1 << 16  # that a rank keeps, of 64 bytes
MERGED = "trace.pftrace"


_job: dict[str, int] | None = None  # rank, size and host of this process, once it has met others
_traced: tuple[Path, Path, int] | None = None  # directory, merged file, process


def meet(rank: int, size: int, host: int, directory: str, whole: bool) -> None:
    """Notes that this rank has met others: the job has ``size`` ranks, or perhaps more if these are not the ``whole``.

    Begins a trace if ``directory`` is not empty and this process is not traced yet.
    """
    global _job
    if whole or _job is None or size > _job["size"]:
        _job = {"rank": rank, "size": size, "host": host}
    if directory and not trace_path():
        begin(directory)


def begin(
    directory: str | os.PathLike[str], steps: int | None = None, events: int = EVENTS, merged: Path | None = None
) -> None:
    """Begins a trace as ``trace`` does, until ``end`` or the process's end. ``merged``: the path of all ranks' file."""
    global _traced
    if _job is None:
        raise InvalidUsage("a trace is of connected ranks: call syncengine.init() before it")
    if steps is not None and steps < 1:
        raise InvalidUsage(f"trace(steps={steps!r}) is not allowed: give how many steps to record, or None for all")
    if not 0 < events < 2**40:
        raise InvalidUsage(f"trace(events={events!r}) is not allowed: give a number from 1 to 2**40 - 1")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidUsage(f"the trace can't be written to {folder}: {error}; give another directory") from error
    about = {
        **_job,
        "hostname": os.uname().nodename,
        "pid": os.getpid(),
        "command": shlex.join(sys.orig_argv)[:4096],
        "epoch_ns": time.time_ns(),
        "clock_ns": trace_now(),
    }
    start_trace(str(folder / f"rank-{_job['rank']}.ring"), events, json.dumps(about), steps or 0)
    _traced = folder, merged or folder / MERGED, os.getpid()
    at_end(end)


def end() -> None:
    """Ends this rank's part of the trace. The last rank makes one file of all. Does nothing without a trace."""
    global _traced
    traced, _traced = _traced, None
    if traced is None or traced[2] != os.getpid() or _job is None:
        return
    folder, merged, _ = traced
    with contextlib.ExitStack() as locked:
        with contextlib.suppress(OSError):  # rank 0 writes to another disk, or this one knows no locks
            first = locked.enter_context((folder / "rank-0.ring").open("r+b"))
            fcntl.flock(first, fcntl.LOCK_EX)  # ranks stop one after the other, so one alone finds all of them over
        stop_trace()
        if not is_complete(folder, _job["size"]):
            return  # the last rank writes it; or some are on hosts with another disk
    try:
        said = write(folder, merged)
    except InvalidUsage as error:
        said = f"{folder}; `python -m syncengine trace {folder}` makes one file of it, but {error}"
    ranks = "1 rank" if _job["size"] == 1 else f"{_job['size']} ranks"
    print_line(f"the trace of {ranks} is in {said}", at_end=True)


@contextlib.contextmanager
def trace(directory: str | os.PathLike[str], steps: int | None = None, *, events: int = EVENTS) -> Iterator[None]:
    """Records what happens on this rank into ``directory``; call it on every rank.

    Each rank writes ``rank-N.ring`` there, which keeps the last ``events`` events (of 64 bytes) and counts those that
    it had to drop; it outlives its process, however that ends. After ``steps`` synchronized backwards (of one model or
    several together) it stops by itself; None: when the block ends. The last rank to end makes ``trace.pftrace`` of all
    of them, for ui.perfetto.dev, if the package ``perfetto`` is installed; ``python -m syncengine trace DIR`` does so,
    too, where hosts have disks of their own after their rings were copied together. ``syncengine.tracing.read`` reads
    the events.

    Raises ``InvalidUsage`` before the ranks have met, if this process is traced already, and if the directory can't be
    written.
    """
    begin(directory, steps, events)
    try:
        yield
    finally:
        end()
