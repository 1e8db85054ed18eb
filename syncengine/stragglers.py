"""Finds the rank that is late, by comparing the ranks' own times of the same steps, of a run or of a trace."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

PHASES = ("input", "forward", "backward", "optimizer")  # those that are a rank's own, as base/phase_clock.h orders them
WHERE = {  # and, behind the colon, what to do
    "input": "before forward begins: look at its input (DataLoader workers, prefetching, where its data lies), at "
    "logging and checkpoints, and at hooks on gradients, such as an optimizer in backward",
    "forward": "in forward: look at the sizes of its batches, and at what else its processor has to do",
    "backward": "in backward: look at the sizes of its batches, and at what else its processor has to do",
    "optimizer": "in the optimizer: look at hooks on step(), and at what else its processor has to do",
}


class RankTimes(TypedDict):
    """Medians of one rank's lateness, in milliseconds, and the percentage of the steps in which the rank is late."""

    late_ms: float
    input_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    late_percent: float


class Verdict(TypedDict):
    """A rank that is late in over two thirds of the steps, and its main phase."""

    rank: int
    phase: str
    late_ms: float
    late_percent: float  # of the steps


class Stragglers(TypedDict):
    """The result of ``Parallel.stragglers()``."""

    steps: int
    step_ms: float
    ranks: dict[int, RankTimes]
    verdict: Verdict | None


def late_text(late: Verdict, steps: str, by: str) -> str:
    """A sentence without its period: in what share of ``steps`` the rank is late, ``by`` how much, and where."""
    return f"rank {late['rank']} is late in {late['late_percent']:.0f} % of {steps}, by {by}, {WHERE[late['phase']]}"


def compare(
    times: Any, ranks: Sequence[int], step_ms: float, least: int
) -> tuple[dict[int, RankTimes], Verdict | None]:
    """How late each rank is, and the rank, if any, that is late in over two thirds of the steps of each half.

    ``times`` are milliseconds by step, rank and phase; NaN for a rank that has none. A rank is late by its time less
    that of the fastest rank. It counts as late in a step if it is behind the middle rank by over a tenth of
    ``step_ms``: where times vary by chance, all ranks but one are behind the fastest. Both halves must agree so that
    chance names nobody, and fewer than ``least`` steps name nobody.
    """
    if len(times) == 0:
        return {}, None
    own = np.asarray(times, dtype=float)
    totals, steps = own.sum(axis=2), np.arange(len(own))
    behind = np.nan_to_num(own - own[steps, np.nanargmin(totals, axis=1)][:, None])
    middle = np.sort(totals)[steps, (np.isfinite(totals).sum(axis=1) - 1) // 2]
    is_late = totals - middle[:, None] > step_ms / 10
    late, by_phase = np.median(behind.sum(axis=2), axis=0), np.median(behind, axis=0)
    found = {
        rank: RankTimes(
            late_ms=float(late[i]),
            late_percent=100 * float(is_late[:, i].mean()),
            **{f"{phase}_ms": float(ms) for phase, ms in zip(PHASES, by_phase[i], strict=True)},  # type: ignore[typeddict-item]
        )
        for i, rank in enumerate(ranks)
    }
    half, latest = len(own) // 2, int(late.argmax())
    if len(own) < least or min(is_late[:half, latest].mean(), is_late[half:, latest].mean()) <= 2 / 3:
        return found, None
    rank, phase = ranks[latest], PHASES[int(by_phase[latest].argmax())]
    ms, percent = found[rank]["late_ms"], found[rank]["late_percent"]
    return found, Verdict(rank=rank, phase=phase, late_ms=ms, late_percent=percent)
