"""Times of steps, the part that is synchronization, and the late rank: as numbers, a warning, a line at a run's end."""

import logging
import math
import os
import sys
import warnings
import weakref
from typing import Any, NamedTuple, cast

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncengine._C import Communicator, StepTimes, begin_optimizer, end_optimizer
from syncengine.communicator import wants_summary
from syncengine.lines import print_line
from syncengine.parallel.model import Model
from syncengine.parallel.reducer import ModelReducer
from syncengine.process_end import at_end
from syncengine.stragglers import PHASES, RankTimes, Stragglers, Verdict, compare, late_text

LEAST_STEPS = 10  # fewer say nothing: buckets are planned in the first ones
LEAST_COMPARED = 40  # steps: fewer name nobody
FIRST_VERDICT = LEAST_COMPARED + 2  # forwards: a step's times are there when the next one has begun
WINDOW = 100  # steps, of which the last are compared
_MOST_MODELS = 64  # that are remembered: of more, those with most steps


class _Followed(NamedTuple):
    name: str
    times: StepTimes
    communicator: weakref.ref[Communicator]
    ranks: list[int]
    waits: bool  # whether it is the host that waits: on a device streams do


_TIMES = np.dtype([(name, np.int64) for name in ("before", "forward", "backward", "comm", "wait", "end")])


class Numbers(NamedTuple):
    """The contents of a ``StepTimes``, the engine's record of a model's steps, as arrays and medians."""

    steps: int  # steps so far
    bytes: int
    times: Any  # the last steps', an array with the fields of _TIMES
    own_ms: Any  # milliseconds by step, rank and phase; NaN for a rank that had no batch
    step_ms: float  # the median time of a step, in milliseconds
    wait_ms: float  # the median time for which this rank waits for averages in a step, in milliseconds


def numbers_of(times: StepTimes) -> Numbers:
    """Reads the engine's record of a model's steps."""
    steps, size, last, stamps = times.summary()
    # pack_stamp() gives each phase 16 bits, of which the upper 5 are the exponent of microseconds.
    bits = np.array(stamps, dtype="<u8")[..., None].view("<u2")
    own = np.ldexp(bits & 0x7FF, bits >> 11) / 1e3
    own[own.sum(axis=-1) == 0] = np.nan
    table = last.view(_TIMES)[:, 0]
    return Numbers(steps, size, table, own, _median_ms_since(table, "before"), _median_ms_since(table, "wait"))


def _median_ms_since(times: Any, begin: str) -> float:
    lasted = (times["end"] - times[begin])[(times["before"] != 0) & (times[begin] != 0)]
    return float(np.median(lasted)) / 1e6 if len(lasted) else 0.0


_followed: list[_Followed] = []
_timed_optimizers: list[Any] = []  # torch's handles of the hooks on all optimizers
os.register_at_fork(after_in_child=_followed.clear)  # the end of a child is not the end of the run


def follow(model: Model, times: StepTimes) -> None:
    """Lets rank 0 print a line about the steps of this model when the process ends, and times optimizers' steps."""
    if not _timed_optimizers:
        _timed_optimizers.append(register_optimizer_step_pre_hook(begin_optimizer))
        _timed_optimizers.append(register_optimizer_step_post_hook(end_optimizer))
    communicator = model.communicator
    if communicator.size == 1 or communicator.global_ranks[communicator.rank] != 0 or not wants_summary():
        return
    at_end(_print_summary)
    if len(_followed) >= _MOST_MODELS:
        _followed.remove(min(_followed, key=lambda one: one.times.summary()[0]))
    on_host = model.device.type == "cpu"
    _followed.append(_Followed(str(model), times, weakref.ref(communicator), communicator.global_ranks, on_host))


def _print_summary() -> None:
    if not _followed or hasattr(sys, "last_value"):
        return  # `last_value`: an uncaught error ends the program
    one = max(_followed, key=lambda one: one.times.summary()[0])
    communicator = one.communicator()
    if communicator is not None and communicator.exception() is not None:
        return
    numbers = numbers_of(one.times)
    if numbers.steps >= LEAST_STEPS:
        print_line(_line(one, numbers), at_end=True)


def _line(one: _Followed, numbers: Numbers) -> str:
    steps, size, step, wait = numbers.steps, numbers.bytes, numbers.step_ms, numbers.wait_ms
    exposed = f", exposed synchronization {wait:.2f} ms ({_percent(wait, step):.1f} %)" if one.waits else ""
    late = f"; {text}" if (text := _late_text(numbers, one.ranks)) else ""
    return (
        f"{steps} steps of {one.name} on {len(one.ranks)} ranks, median {step:.2f} ms{exposed}; "
        f"{_size(size / steps)} of gradients reduced a step, {_size(size)} in all{late} "
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
    """The result of ``Parallel.stats``. ``ranks``: the members' ranks in the job; ``rank``: this member's number."""
    last = reducer.statistics()
    numbers = numbers_of(reducer.step_times())
    found, _ = _compare_numbers(numbers, ranks)
    latest = max(found, key=lambda each: found[each]["late_ms"], default=0)
    own, theirs = (cast(dict[str, float], found.get(each, {})) for each in (ranks[rank], latest))
    return {
        "steps": numbers.steps,
        "step_ms": numbers.step_ms,
        "exposed_sync_ms": numbers.wait_ms,
        "exposed_sync_percent": _percent(numbers.wait_ms, numbers.step_ms),
        "late_ms": own.get("late_ms", 0.0),
        **{f"late_{phase}_ms": own.get(f"{phase}_ms", 0.0) for phase in PHASES},
        "latest_rank": latest,
        "latest_rank_ms": theirs.get("late_ms", 0.0),
        "total_reduced_bytes": numbers.bytes,
        "reduced_bytes": last["reduced_bytes"],
        "copied_bytes": sum(last["copied_bytes"].values()),
        "staged_bytes": sum(last["staged_bytes"].values()),
        "buckets": last["buckets"],
    }


def for_loggers(stats: dict[str, float]) -> dict[str, float]:
    """The part of ``Parallel.stats()`` that frameworks' loggers get automatically; nothing before the first step."""
    names = ("step_ms", "exposed_sync_ms", "latest_rank", "latest_rank_ms")
    return {f"syncengine/{name}": stats[name] for name in names if stats["steps"]}


def stragglers_of(reducer: ModelReducer, ranks: list[int]) -> Stragglers:
    """The result of ``Parallel.stragglers``."""
    numbers = numbers_of(reducer.step_times())
    found, late = _compare_numbers(numbers, ranks)
    return {
        "steps": len(numbers.own_ms),
        "step_ms": numbers.step_ms,
        "ranks": found,
        "verdict": late,
    }


def warn_of_straggler(reducer: ModelReducer, ranks: list[int], model: str) -> None:
    """Warns of a rank that is late in most of the last steps, if there is one."""
    if text := _late_text(numbers_of(reducer.step_times()), ranks):
        try:
            warnings.warn(f"{model}: {text}", RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # a filter makes an error of it, which the other ranks would not have
            print_line(f"{model}: {text}", level=logging.WARNING)


def _late_text(numbers: Numbers, ranks: list[int]) -> str:
    _, late = _compare_numbers(numbers, ranks)
    if late is None:
        return ""
    steps = f"the last {len(numbers.own_ms)} steps"
    return late_text(late, steps, f"{late['late_ms']:.1f} ms (a step takes {numbers.step_ms:.1f} ms)")


def _compare_numbers(numbers: Numbers, ranks: list[int]) -> tuple[dict[int, RankTimes], Verdict | None]:
    return compare(numbers.own_ms, ranks, numbers.step_ms, LEAST_COMPARED)
