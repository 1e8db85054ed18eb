"""How long steps take, what of that is synchronization, and who is late: as numbers, as a warning, and as one line at a
run's end.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncengine._C import Communicator, StepTimes, begin_optimizer, end_optimizer
from syncengine.communicator import wants_summary
from syncengine.parallel.model import Model
from syncengine.parallel.reducer import ModelReducer
from syncengine.process_end import at_end

LEAST_STEPS = 10  # fewer say nothing: buckets are planned in the first ones
LEAST_COMPARED = 40  # steps: fewer name nobody
WINDOW = 100  # steps, of which the last are compared
_MOST_MODELS = 64  # that are remembered: of more, those with most steps


class _Followed(NamedTuple):
    name: str
    times: StepTimes
    communicator: weakref.ref[Communicator]
    ranks: list[int]
    waits: bool  # of the host; on a device streams wait


_followed: list[_Followed] = []
_timed_optimizers: list[Any] = []  # torch's handles of the hooks on all optimizers
_pid: int | None = None  # whose end is the run's: forked children inherit all this


def follow(model: Model, times: StepTimes) -> None:
    """At the end of this process, rank 0 may say how the steps of this model went. Optimizers' steps are timed."""
    global _pid
    if not _timed_optimizers:
        _timed_optimizers.append(register_optimizer_step_pre_hook(begin_optimizer))
        _timed_optimizers.append(register_optimizer_step_post_hook(end_optimizer))
    communicator = model.communicator
    if communicator.size == 1 or communicator.global_ranks[communicator.rank] != 0 or not wants_summary():
        return
    if _pid is None:
        _pid = os.getpid()
        at_end(_print_line)
    if len(_followed) >= _MOST_MODELS:
        _followed.remove(min(_followed, key=lambda one: one.times.summary()["steps"]))
    on_host = model.device.type == "cpu"
    _followed.append(_Followed(str(model), times, weakref.ref(communicator), communicator.global_ranks, on_host))


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


def _line(one: _Followed, numbers: dict[str, Any]) -> str:
    steps, wait, step = numbers["steps"], numbers["median_wait"], numbers["median"]
    exposed = f", exposed synchronization {wait / 1e6:.2f} ms ({_percent(wait, step):.1f} %)" if one.waits else ""
    verdict = _verdict(numbers, one.ranks)
    late = "" if verdict is None else f"; {_late_text(verdict, numbers)}"
    return (
        f"syncengine: {steps} steps of {one.name} on {len(one.ranks)} ranks, median {step / 1e6:.2f} ms{exposed}; "
        f"{_size(numbers['bytes'] / steps)} of gradients reduced a step, {_size(numbers['bytes'])} in all{late} "
        "(SYNCENGINE_SUMMARY=0: without this line)"
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _size(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def stats_of(reducer: ModelReducer, ranks: list[int], rank: int) -> dict[str, float]:
    """See ``Parallel.stats``. ``ranks`` of the communicator, in which this one is ``rank``."""
    last = reducer.statistics()
    numbers = reducer.step_times().summary() if reducer.reduces else _NO_NUMBERS
    wait, step = numbers["median_wait"], numbers["median"]
    found = _stragglers(numbers, ranks)
    latest = max(found["ranks"], key=lambda each: found["ranks"][each]["late_ms"], default=0)
    nobody = dict.fromkeys((f"{what}_ms" for what in ("late", *PHASES)), 0.0)
    own, theirs = found["ranks"].get(ranks[rank], nobody), found["ranks"].get(latest, nobody)
    return {
        "steps": numbers["steps"],
        "step_ms": step / 1e6,
        "exposed_sync_ms": wait / 1e6,
        "exposed_sync_percent": _percent(wait, step),
        "late_ms": own["late_ms"],
        **{f"late_{phase}_ms": own[f"{phase}_ms"] for phase in PHASES},
        "latest_rank": latest,
        "latest_rank_ms": theirs["late_ms"],
        "total_reduced_bytes": numbers["bytes"],
        "reduced_bytes": last["reduced_bytes"],
        "copied_bytes": sum(last["copied_bytes"].values()),
        "staged_bytes": sum(last["staged_bytes"].values()),
        "buckets": last["buckets"],
    }


def for_loggers(stats: dict[str, float]) -> dict[str, float]:
    """Those of ``Parallel.stats()`` that frameworks' loggers get by themselves; none before anything is known."""
    names = ("step_ms", "exposed_sync_ms", "latest_rank", "latest_rank_ms")
    return {f"syncengine/{name}": stats[name] for name in names if stats["steps"]}


_NO_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("steps", "bytes", "median", "median_wait", "compared"), 0),
    "ranks": [],
}  # of StepTimes.summary()


# --- Who is late

PHASES = ("input", "forward", "backward", "optimizer")  # as in `by_phase` of StepTimes.summary()
_WHERE = {
    "input": "before forward begins: look at its input",
    "forward": "in forward, with the loss",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
}


def stragglers_of(reducer: ModelReducer, ranks: list[int]) -> dict[str, Any]:
    """See ``Parallel.stragglers``."""
    return _stragglers(reducer.step_times().summary() if reducer.reduces else _NO_NUMBERS, ranks)


def warn_of_straggler(reducer: ModelReducer, ranks: list[int], model: str) -> None:
    """Says who is late in most of the last steps, if anybody is."""
    numbers = reducer.step_times().summary()
    if (verdict := _verdict(numbers, ranks)) is not None:
        warnings.warn(f"{model}: {_late_text(verdict, numbers)}", RuntimeWarning, stacklevel=2)


def _stragglers(numbers: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    compared = numbers["compared"]
    found = {}
    for rank, times in zip(ranks, numbers["ranks"], strict=False):  # nothing is compared yet, or all are
        by_phase = {f"{phase}_ms": time / 1e6 for phase, time in zip(PHASES, times["by_phase"], strict=True)}
        percent = _percent(sum(times["often"]), compared)
        found[rank] = {"late_ms": times["late"] / 1e6, **by_phase, "late_percent": percent}
    return {
        "steps": compared,
        "step_ms": numbers["median"] / 1e6,
        "ranks": found,
        "verdict": _verdict(numbers, ranks),
    }


def _verdict(numbers: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any] | None:
    """Who is late in over two thirds of the steps, in either half of those compared, so that chance names nobody."""
    compared = numbers["compared"]
    if compared < LEAST_COMPARED:
        return None
    halves = compared // 2, compared - compared // 2
    rank, times = max(zip(ranks, numbers["ranks"], strict=True), key=lambda each: each[1]["late"])
    if any(3 * often <= 2 * half for often, half in zip(times["often"], halves, strict=True)):
        return None
    phase = max(zip(times["by_phase"], PHASES, strict=True))[1]
    percent = _percent(sum(times["often"]), compared)
    return {"rank": rank, "phase": phase, "late_ms": times["late"] / 1e6, "late_percent": percent}


def _late_text(verdict: dict[str, Any], numbers: dict[str, Any]) -> str:
    return (
        f"rank {verdict['rank']} is late in {verdict['late_percent']:.0f} % of the last {numbers['compared']} steps, "
        f"by {verdict['late_ms']:.1f} ms (a step takes {numbers['median'] / 1e6:.1f} ms), {_WHERE[verdict['phase']]}"
    )
