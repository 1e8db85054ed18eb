"""Steps of a trace, and who is late in them: pure functions of its events. Times are milliseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from syncengine.tracing import Event, Kind, Phase

LATE_SHARE = 0.1  # of a step: who is later than that is late in it
OWN = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)  # what a rank does by itself

WHERE = {
    Phase.INPUT: "before forward begins: look at its input",
    Phase.FORWARD: "in forward: look at the sizes of its batches, and at what else its processor has to do",
    Phase.BACKWARD: "in backward: look at the sizes of its batches, and at what else its processor has to do",
    Phase.OPTIMIZER: "in the optimizer: look at what it alone does between steps (logging, checkpoints)",
}


PHASE_NAMES = {
    Phase.INPUT: "input",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WAIT: "waiting for averages",
    Phase.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    number: int
    begin: int  # nanoseconds
    end: int
    phases: dict[Phase, float]
    own: dict[Phase, float]  # the same, less what was not its own: it waited for others, say
    computed: int  # since then it has only waited for averages; nanoseconds

    @property
    def duration(self) -> float:
        """Milliseconds."""
        return (self.end - self.begin) / 1e6


@dataclass(frozen=True)
class Late:
    """A rank for which the others wait in most of the steps."""

    rank: int
    percent: float  # of the steps
    ms: float  # median over those steps
    phase: Phase  # where most of that arises

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is late in {self.percent:.0f} % of the steps, by {ms_text(self.ms)}, {WHERE[self.phase]}"
        )


def steps_of(events: Mapping[int, Sequence[Event]]) -> tuple[str, dict[int, dict[int, Step]]]:
    """The model with most steps, and these, by rank and number."""
    counts: dict[str, int] = defaultdict(int)
    for of_rank in events.values():
        for event in of_rank:
            if event.kind == Kind.STEP:
                counts[event.text] += 1
    if not counts:
        return "", {}
    model = max(counts, key=lambda text: counts[text])
    return model, {rank: _steps_of_rank(of_rank, model) for rank, of_rank in events.items()}


def _steps_of_rank(events: Sequence[Event], model: str) -> dict[int, Step]:
    phases = sorted((e for e in events if e.kind == Kind.PHASE), key=lambda e: e.begin)
    steps: dict[int, Step] = {}
    at = 0
    for step in sorted((e for e in events if e.kind == Kind.STEP and e.text == model), key=lambda e: e.begin):
        while at < len(phases) and phases[at].end <= step.begin:
            at += 1
        total, own, computed = dict.fromkeys(Phase, 0.0), dict.fromkeys(OWN, 0.0), step.end
        for event in phases[at:]:
            if event.begin >= step.end:
                break
            part = _common(event, step) / 1e6
            phase = Phase(event.lane)
            total[phase] += part
            if phase == Phase.WAIT:
                computed = event.begin
            if phase in own:
                whole = max(1, event.end - event.begin)
                own[phase] += part * (1 - min(1.0, event.detail / whole))
        steps[step.place] = Step(step.place, step.begin, step.end, total, own, computed)
    return steps


def lateness_of(steps: Mapping[int, Mapping[int, Step]], numbers: Sequence[int]) -> dict[int, list[float]]:
    """Of each rank by step: its own time, less that of the fastest rank."""
    own = {rank: [sum(of_rank[n].own.values()) for n in numbers] for rank, of_rank in steps.items()}
    fastest = [min(times) for times in zip(*own.values(), strict=True)]
    return {rank: [t - f for t, f in zip(times, fastest, strict=True)] for rank, times in own.items()}


def who_is_late(
    steps: Mapping[int, Mapping[int, Step]], lateness: Mapping[int, Sequence[float]], step_ms: float
) -> Late | None:
    """The rank that is late by more than ``LATE_SHARE`` of a step in most of them, if there is one."""
    found: list[Late] = []
    for rank, late in lateness.items():
        steps_late = [i for i, ms in enumerate(late) if ms > LATE_SHARE * step_ms]
        if len(late) < 2 or 2 * len(steps_late) <= len(late):
            continue
        numbers = list(steps[rank])
        by_phase = {
            phase: median(
                steps[rank][numbers[i]].own[phase] - min(of_rank[numbers[i]].own[phase] for of_rank in steps.values())
                for i in steps_late
            )
            for phase in OWN
        }
        worst = max(by_phase, key=lambda phase: by_phase[phase])
        found.append(Late(rank, 100 * len(steps_late) / len(late), median(late[i] for i in steps_late), worst))
    return max(found, key=lambda one: one.ms, default=None)


def ms_text(value: float) -> str:
    """``41 ms``."""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def size_text(size: float) -> str:
    """``3.2 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _common(a: Event, b: Event) -> int:
    return max(0, min(a.end, b.end) - max(a.begin, b.begin))
