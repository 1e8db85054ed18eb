"""What a trace says: pure functions of its events. Times are milliseconds, unless said otherwise."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from syncengine.report.steps import Late, Step, lateness_of, ms_text, steps_of, who_is_late
from syncengine.tracing import Event, Kind, Phase, Trace
from syncengine.tracing.perfetto import caveats


@dataclass(frozen=True)
class ExposedBucket:
    """A bucket whose reduction goes on when a rank has nothing else to do."""

    index: int
    parameters: list[str]
    bytes: int
    ms: float  # of a step, mean over steps, on the rank where it is longest
    percent: float  # of the steps

    @property
    def name(self) -> str:
        """``head.weight and 3 others``."""
        more = len(self.parameters) - 1
        first = self.parameters[0] if self.parameters else "?"
        return first if more <= 0 else f"{first} and {more} other{'s' if more > 1 else ''}"


@dataclass(frozen=True)
class Overlap:
    """How much of a rank's reductions is hidden behind its backward: 1 is all of it."""

    achieved: float
    possible: float  # with these buckets, if each were reduced once the ranks have it
    reducing: float  # of a step
    exposed: float  # of that, what nothing hides
    least_exposed: float


@dataclass(frozen=True)
class Analysis:
    """All that the page shows."""

    model: str
    steps: int
    step_ms: float
    phases: dict[int, dict[Phase, float]]  # of each rank, medians
    lateness: dict[int, list[float]]  # of each rank, by step
    late: Late | None
    overlap: dict[int, Overlap]
    buckets: list[ExposedBucket]
    copies: dict[str, float]  # bytes of a step by reason, on the rank where they are most
    reduced_bytes: int  # of a step
    went_wrong: list[str]
    incomplete: list[str]  # what the trace has not
    example: dict[int, list[Event]] = field(default_factory=dict)  # the events of a step that took the median

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.steps:
            return "There is no step that all ranks have recorded: trace more of them."
        if self.late is not None:
            return f"{str(self.late)[0].upper()}{str(self.late)[1:]}."
        exposed = max((o.exposed for o in self.overlap.values()), default=0.0)
        percent = 100 * exposed / self.step_ms if self.step_ms else 0.0
        if percent > 5:
            mostly = f", mostly that of {self.buckets[0].name}" if self.buckets else ""
            return (
                f"No rank is late. Synchronization that nothing hides takes {percent:.0f} % of a step "
                f"({ms_text(exposed)} of {ms_text(self.step_ms)}){mostly}."
            )
        return (
            f"No rank is late, and synchronization that nothing hides takes {percent:.1f} % of a step: the rest is the "
            "model's own."
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        late = self.late and {
            "rank": self.late.rank,
            "phase": self.late.phase.name.lower(),
            "late_ms": self.late.ms,
            "late_percent": self.late.percent,
        }
        ranks = {
            str(rank): {
                "phases_ms": {phase.name.lower(): ms for phase, ms in phases.items()},
                "late_ms": median(self.lateness[rank]),
                "overlap": vars(self.overlap[rank]) if rank in self.overlap else None,
            }
            for rank, phases in self.phases.items()
        }
        same = ("model", "steps", "step_ms", "reduced_bytes", "went_wrong", "incomplete")
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in same},
            "late": late,
            "ranks": ranks,
            "exposed_buckets": [vars(bucket) for bucket in self.buckets],
            "copied_bytes": self.copies,
        }


def analyze(trace: Trace) -> Analysis:
    """Of the model with most steps, in those that all ranks have recorded."""
    events = {rank: of_rank.events for rank, of_rank in trace.ranks.items()}
    model, steps = steps_of(events)
    numbers = sorted(set.intersection(*(set(s) for s in steps.values()))) if steps else []
    if len(numbers) > 4:
        numbers = numbers[1:]  # the first one makes what the others use
    steps = {rank: {n: of_rank[n] for n in numbers} for rank, of_rank in steps.items()}
    step_ms = median([s.duration for of_rank in steps.values() for s in of_rank.values()]) if numbers else 0.0
    lateness = lateness_of(steps, numbers)
    late = who_is_late(steps, lateness, step_ms)
    reductions = {rank: _reductions(events[rank], steps[rank].values()) for rank in steps}
    parts = exposed_parts(steps, reductions)
    overlap = {rank: overlap_of(steps[rank], of_rank) for rank, of_rank in parts.items() if of_rank}
    buckets = exposed_buckets(parts, max(1, len(numbers)))
    copies = _copies(events, numbers)
    phases = {
        rank: {phase: median(s.phases[phase] for s in of_rank.values()) for phase in Phase}
        for rank, of_rank in steps.items()
        if numbers
    }
    wrong = [e.text for of_rank in events.values() for e in of_rank if e.kind == Kind.ERROR or _is_nonfinite(e)]
    example = {}
    if numbers:
        first = min(steps)
        middle = min(numbers, key=lambda n: abs(steps[first][n].duration - step_ms))
        for rank, of_rank in steps.items():
            step = of_rank[middle]
            example[rank] = [e for e in events[rank] if e.end > step.begin and e.begin < step.end]
    reduced_bytes = max((sum(r.bytes for r in of_rank) for of_rank in reductions.values()), default=0)
    return Analysis(
        model=model,
        steps=len(numbers),
        step_ms=step_ms,
        phases=phases,
        lateness=lateness,
        late=late,
        overlap=overlap,
        buckets=buckets,
        copies=copies,
        reduced_bytes=reduced_bytes // max(1, len(numbers)),
        went_wrong=list(dict.fromkeys(wrong)),
        incomplete=caveats(trace),
        example=example,
    )


@dataclass(frozen=True)
class Reduction:
    """One bucket's on one rank, in one step. Nanoseconds."""

    step: int
    operation: tuple[int, int, int, int]
    index: int
    parameters: tuple[str, ...]
    bytes: int
    ready: int  # this rank has announced it
    begin: int
    end: int


def _reductions(events: Sequence[Event], steps: Iterable[Step]) -> list[Reduction]:
    """Of this rank's gradient buckets, by their begin."""
    buckets = {event.operation: event for event in events if event.kind == Kind.BUCKET}
    announced = {event.operation: event.begin for event in events if event.kind == Kind.ANNOUNCED}
    ordered = sorted(steps, key=lambda step: step.begin)
    begins = [step.begin for step in ordered]
    found = []
    for event in (event for event in events if event.kind == Kind.REDUCED and event.operation in buckets):
        at = bisect.bisect_right(begins, event.begin) - 1
        if at < 0 or event.begin > ordered[at].end:
            continue
        _, index, parameters = buckets[event.operation].bucket
        ready, step = announced.get(event.operation, event.begin), ordered[at].number
        found.append(
            Reduction(step, event.operation, index, tuple(parameters), event.detail, ready, event.begin, event.end)
        )
    return found


def finish(ready: Sequence[float], durations: Sequence[float]) -> float:
    """When the last of these buckets is reduced, if each is as soon as it is ready and the one before is done."""
    at = -math.inf
    for begin, duration in sorted(zip(ready, durations, strict=True)):
        at = max(at, begin) + duration
    return at


def exposed_parts(
    steps: Mapping[int, Mapping[int, Step]], reductions: Mapping[int, Sequence[Reduction]]
) -> dict[int, list[tuple[Reduction, int, int]]]:
    """Of each rank's reductions: how long each takes, and how much of that nothing hides. Nanoseconds.

    What a reduction takes, the rank knows that had to wait least in it. What a rank waits for the last announcement is
    not the reduction's.
    """
    took: dict[tuple[int, int, int, int], int] = {}
    last: dict[tuple[int, int, int, int], int] = {}  # when all ranks had it
    for one in itertools.chain.from_iterable(reductions.values()):
        took[one.operation] = min(took.get(one.operation, one.end - one.begin), one.end - one.begin)
        last[one.operation] = max(last.get(one.operation, one.ready), one.ready)
    found: dict[int, list[tuple[Reduction, int, int]]] = {}
    for rank, of_rank in reductions.items():
        found[rank] = []
        for one in of_rank:
            idle = one.end - max(one.begin, last[one.operation], steps[rank][one.step].computed)
            found[rank].append((one, took[one.operation], min(max(0, idle), took[one.operation])))
    return found


def overlap_of(steps: Mapping[int, Step], parts: Sequence[tuple[Reduction, int, int]]) -> Overlap:
    """Of one rank, means over steps."""
    by_step: dict[int, list[tuple[Reduction, int, int]]] = defaultdict(list)
    for part in parts:
        by_step[part[0].step].append(part)
    total = exposed = least = 0.0
    for number, of_step in by_step.items():
        durations = [took for _, took, _ in of_step]
        end = finish([one.ready for one, _, _ in of_step], durations)
        total += sum(durations)
        exposed += sum(idle for _, _, idle in of_step)
        least += min(max(0.0, end - steps[number].computed), sum(durations))
    count = max(1, len(by_step)) * 1e6
    least = min(least, exposed)
    if not total:
        return Overlap(1.0, 1.0, 0.0, 0.0, 0.0)
    return Overlap(1 - exposed / total, 1 - least / total, total / count, exposed / count, least / count)


def exposed_buckets(parts: Mapping[int, Sequence[tuple[Reduction, int, int]]], steps: int) -> list[ExposedBucket]:
    """Most exposed first."""
    found: dict[tuple[int, tuple[str, ...]], ExposedBucket] = {}
    for of_rank in parts.values():
        by_bucket: dict[tuple[int, tuple[str, ...]], list[tuple[Reduction, int, int]]] = defaultdict(list)
        for part in of_rank:
            by_bucket[part[0].index, part[0].parameters].append(part)
        for key, of_bucket in by_bucket.items():
            ms = sum(idle for _, _, idle in of_bucket) / 1e6 / steps
            percent = 100 * sum(idle > 10_000 for _, _, idle in of_bucket) / steps
            if ms > 0.001 and (key not in found or found[key].ms < ms):
                found[key] = ExposedBucket(key[0], list(key[1]), of_bucket[-1][0].bytes, ms, percent)
    return sorted(found.values(), key=lambda bucket: -bucket.ms)


def _copies(events: Mapping[int, Sequence[Event]], numbers: Sequence[int]) -> dict[str, float]:
    most: dict[str, float] = {}
    for of_rank in events.values():
        sums: dict[str, float] = defaultdict(float)
        for event in of_rank:
            if event.kind == Kind.COPY and event.place in set(numbers):
                sums[event.text] += event.detail
        for reason, size in sums.items():
            most[reason] = max(most.get(reason, 0.0), size / max(1, len(numbers)))
    return dict(sorted(most.items(), key=lambda item: -item[1]))


def _is_nonfinite(event: Event) -> bool:
    return event.kind == Kind.NOTE and event.text.startswith("nonfinite")
