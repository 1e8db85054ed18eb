"""The numbers of a trace, under the names that `--json` gives them. Times are milliseconds."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from syncengine.errors import name_ranks
from syncengine.report.steps import Reduction, Step, reductions_of, steps_of
from syncengine.stragglers import Verdict, compare, late_text
from syncengine.tracing import Kind, Phase, Trace
from syncengine.tracing.perfetto import caveats

PHASES_SHOWN = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "wait": "waiting for averages",
    "optimizer": "optimizer",
}
RANKS_SHOWN = 16


@dataclass(frozen=True)
class Overlap:
    """How much of a rank's reductions is hidden behind its backward: 1 if all of it is."""

    achieved: float
    possible: float  # the share if each of these buckets were reduced once the rank has it
    reducing: float  # mean milliseconds of a step
    exposed: float  # the part of them that nothing hides
    least_exposed: float


@dataclass(frozen=True)
class OfRank:
    """Medians over the steps of one rank."""

    phases_ms: dict[str, float]
    late_ms: float
    overlap: Overlap | None  # none if it has reduced nothing


@dataclass(frozen=True)
class ExposedBucket:
    """A bucket whose reduction goes on when a rank has nothing else to do."""

    index: int
    parameters: list[str]
    bytes: int
    ms: float  # a step's, as a mean over steps, on the rank where it is longest
    percent: float  # the share of the steps' time

    @property
    def names(self) -> str:
        """The names of the bucket's first parameters."""
        return ", ".join(self.parameters[:4]) + (" ..." if len(self.parameters) > 4 else "")


@dataclass(frozen=True)
class Analysis:
    """The numbers and texts that the report's page shows of one training run."""

    model: str
    steps: int
    step_ms: float
    reduced_bytes: int  # bytes a step
    late: Verdict | None
    ranks: dict[int, OfRank]
    exposed_buckets: list[ExposedBucket]  # the most exposed one first
    copied_bytes: dict[str, float]  # bytes a step by reason, on the rank that copies most
    went_wrong: list[str]
    missing: list[int]  # ranks of which there is no trace
    incomplete: list[str]  # texts about data that the trace lacks
    example: dict[int, Step]  # a step of each rank that took the median time

    @property
    def overlap(self) -> dict[int, Overlap]:
        """The overlap of each rank that has reduced something."""
        return {rank: of_rank.overlap for rank, of_rank in self.ranks.items() if of_rank.overlap is not None}

    @property
    def exposed_ms(self) -> float:
        """Exposed synchronization as ``Parallel.stats()`` has it: how long the first rank waits for averages."""
        return next(iter(self.ranks.values())).phases_ms["wait"] if self.ranks else 0.0

    @property
    def waiting_ms(self) -> float:
        """The part of ``exposed_ms`` in which nothing is reduced, since ranks wait for each other."""
        return max(0.0, self.exposed_ms - max((overlap.exposed for overlap in self.overlap.values()), default=0.0))

    @property
    def verdict(self) -> str:
        """Which rank is late, or how much synchronization nothing hides: one sentence, or two."""
        if not self.steps:
            return "There is no step that all ranks have recorded: trace more of them."
        percent = 100 * self.exposed_ms / self.step_ms
        takes = f"xposed synchronization takes {percent:.{int(percent <= 5)}f} % of a step"
        times = f"({ms_text(self.exposed_ms)} of {ms_text(self.step_ms)})"
        if self.missing:
            return (
                f"There is no trace of {name_ranks(self.missing)}, so who is late can't be told. E{takes} {times}, in "
                "part perhaps the wait for a rank that is late."
            )
        if self.late is not None:
            text = late_text(self.late, "the steps", ms_text(self.late["late_ms"]))
            return f"{text[0].upper()}{text[1:]}."
        if percent <= 5:
            return f"No rank is late, and e{takes}: the rest is the model's own."
        mostly = f", mostly that of {self.exposed_buckets[0].names}" if self.exposed_buckets else ""
        if self.waiting_ms > self.exposed_ms / 2:
            mostly = f", of which ranks wait for each other {ms_text(self.waiting_ms)}"
        return f"No rank is late. E{takes} {times}{mostly}."

    def as_dict(self) -> dict[str, object]:
        """The analysis as a dict for JSON, with the sentence on who is late first."""
        said = asdict(replace(self, example={}))
        del said["example"]
        return {"verdict": self.verdict, **said}


def analyze(trace: Trace) -> Analysis:
    """Analyzes the model with most steps, in the steps that all ranks have recorded."""
    model, steps = steps_of(trace)
    by_step = list(steps.values())
    step_ms = median(step.ms for of_step in by_step for step in of_step.values()) if steps else 0.0
    own = [[step.own for step in of_step.values()] for of_step in by_step]
    lateness, late = compare(own, list(trace.ranks), step_ms, least=2)
    reductions = [reductions_of(of_step) for of_step in by_step]
    ranks = {
        rank: OfRank(
            {phase.name.lower(): median(of_step[rank].phases[phase] for of_step in by_step) for phase in Phase},
            times["late_ms"],
            overlap_of([(of_step[rank], done[rank]) for of_step, done in zip(by_step, reductions, strict=True)]),
        )
        for rank, times in lateness.items()
    }
    wrong = [event.text for event in trace.events if event.kind == Kind.ERROR or event.text.startswith("nonfinite: ")]
    return Analysis(
        model=model,
        steps=len(steps),
        step_ms=step_ms,
        reduced_bytes=max((step.bytes for of_step in by_step for step in of_step.values()), default=0),
        late=late,
        ranks=ranks,
        exposed_buckets=exposed_buckets(reductions),
        copied_bytes=_copies(trace, steps.keys()),
        went_wrong=list(dict.fromkeys(wrong)),
        missing=trace.missing,
        incomplete=caveats(trace),
        example=min(by_step, key=lambda of_step: abs(max(step.ms for step in of_step.values()) - step_ms), default={}),
    )


def finish(ready: Sequence[float], durations: Sequence[float]) -> float:
    """When the last of these buckets is reduced, if each begins as soon as it is ready and the one before is done."""
    at = -math.inf
    for begin, duration in sorted(zip(ready, durations, strict=True)):
        at = max(at, begin) + duration
    return at


def overlap_of(steps: Sequence[tuple[Step, Sequence[Reduction]]]) -> Overlap | None:
    """The overlap of one rank, from its steps and its reductions in each."""
    total = exposed = least = count = 0.0
    for step, reductions in steps:
        if reductions:
            durations = [one.took for one in reductions]
            late = finish([one.ready for one in reductions], durations) - step.computed
            total += sum(durations)
            exposed += sum(one.idle for one in reductions)
            least += min(max(0.0, late), sum(durations))
            count += 1e6
    if not count:
        return None
    total, least = max(total, 1.0), min(least, exposed)
    return Overlap(1 - exposed / total, 1 - least / total, total / count, exposed / count, least / count)


def exposed_buckets(steps: Sequence[Mapping[int, Sequence[Reduction]]]) -> list[ExposedBucket]:
    """The buckets whose reduction nothing hides, from each rank's reductions in each step; the most exposed first."""
    times: dict[tuple[str, int], list[int]] = defaultdict(list)  # by bucket and rank
    buckets = {}
    for of_step in steps:
        for rank, reductions in of_step.items():
            for one in reductions:
                buckets[one.bucket.text] = one.bucket
                times[one.bucket.text, rank].append(one.idle)
    found: dict[str, ExposedBucket] = {}
    for (text, _), idle in times.items():
        ms, percent = sum(idle) / 1e6 / len(steps), 100 * sum(ns > 10_000 for ns in idle) / len(steps)
        if ms > 0.001 and (text not in found or found[text].ms < ms):
            _, index, parameters = buckets[text].bucket
            found[text] = ExposedBucket(index, parameters, buckets[text].detail, ms, percent)
    return sorted(found.values(), key=lambda bucket: -bucket.ms)


def _copies(trace: Trace, numbers: Collection[int]) -> dict[str, float]:
    most: Counter[str] = Counter()
    for of_rank in trace.ranks.values():
        sums: Counter[str] = Counter()
        for event in of_rank.events:
            if event.kind == Kind.COPY and event.place in numbers:
                sums[event.text] += event.detail
        most |= sums
    return {reason: size / len(numbers) for reason, size in most.most_common()}


def ms_text(value: float) -> str:
    """Milliseconds as a text such as ``41 ms``."""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"
