"""How long steps take, and what of that is synchronization: as numbers for loggers, and as one line at a run's end."""

from __future__ import annotations

import math
import os
import sys
import weakref
from typing import NamedTuple

from syncengine._C import Communicator, StepTimes
from syncengine.communicator import wants_summary
from syncengine.parallel.model import Model
from syncengine.parallel.reducer import ModelReducer
from syncengine.process_end import at_end

LEAST_STEPS = 10  # fewer say nothing: buckets are planned in the first ones
_MOST_MODELS = 64  # that are remembered: of more, those with most steps


class _Followed(NamedTuple):
    name: str
    times: StepTimes
    communicator: weakref.ref[Communicator]
    ranks: int
    waits: bool  # of the host; on a device streams wait


_followed: list[_Followed] = []
_pid: int | None = None  # whose end is the run's: forked children inherit all this


def follow(model: Model, times: StepTimes) -> None:
    """At the end of this process, rank 0 may say how the steps of this model went."""
    global _pid
    communicator = model.communicator
    if communicator.global_ranks[communicator.rank] != 0 or not wants_summary():
        return
    if _pid is None:
        _pid = os.getpid()
        at_end(_print_line)
    if len(_followed) >= _MOST_MODELS:
        _followed.remove(min(_followed, key=lambda one: one.times.summary()["steps"]))
    on_host = model.device.type == "cpu"
    _followed.append(_Followed(str(model), times, weakref.ref(communicator), communicator.size, on_host))


def _print_line() -> None:
    if _pid != os.getpid() or hasattr(sys, "last_value"):
        return  # `last_value`: an uncaught error ends the program
    one = max(_followed, key=lambda one: one.times.summary()["steps"])
    communicator = one.communicator()
    if communicator is not None and communicator.exception() is not None:
        return
    numbers = one.times.summary()
    if numbers["steps"] >= LEAST_STEPS and sys.stderr is not None:
        print(_line(one, numbers), file=sys.stderr, flush=True)


def _line(one: _Followed, numbers: dict[str, int]) -> str:
    steps, wait, step = numbers["steps"], numbers["median_wait"], numbers["median"]
    exposed = f", exposed synchronization {wait / 1e6:.2f} ms ({_percent(wait, step):.1f} %)" if one.waits else ""
    return (
        f"syncengine: {steps} steps of {one.name} on {one.ranks} ranks, median {step / 1e6:.2f} ms{exposed}; "
        f"{_size(numbers['bytes'] / steps)} of gradients reduced a step, {_size(numbers['bytes'])} in all "
        "(SYNCENGINE_SUMMARY=0: without this line)"
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _size(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def stats_of(reducer: ModelReducer) -> dict[str, float]:
    """See ``Parallel.stats``."""
    last = reducer.statistics()
    numbers = reducer.step_times().summary() if reducer.reduces else dict.fromkeys(_NUMBERS, 0)
    wait, step = numbers["median_wait"], numbers["median"]
    return {
        "steps": numbers["steps"],
        "step_ms": step / 1e6,
        "exposed_sync_ms": wait / 1e6,
        "exposed_sync_percent": _percent(wait, step),
        "total_reduced_bytes": numbers["bytes"],
        "reduced_bytes": last["reduced_bytes"],
        "copied_bytes": sum(last["copied_bytes"].values()),
        "staged_bytes": sum(last["staged_bytes"].values()),
        "buckets": last["buckets"],
    }


_NUMBERS = ("steps", "bytes", "median", "median_wait")  # of StepTimes.summary()
