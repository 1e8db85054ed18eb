"""Steps of a trace, and the reductions in them. Times are in nanoseconds, unless a name says otherwise."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncengine.stragglers import PHASES
from syncengine.tracing import Event, Kind, Phase, Trace
from syncengine.tracing.events import by_operation


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    begin: int
    end: int
    bytes: int  # bytes that were reduced
    events: Sequence[Event]  # events that begin in it
    phases: dict[Phase, float]  # milliseconds
    own: list[float]  # by stragglers.PHASES: less the time that was not the rank's own, as when it waited for others
    computed: int  # the time from which on it only waited for averages

    @property
    def ms(self) -> float:
        """How long the step takes, in milliseconds."""
        return (self.end - self.begin) / 1e6


def steps_of(trace: Trace) -> tuple[str, dict[int, dict[int, Step]]]:
    """The model with most steps; and those that all ranks have recorded, less the first of many: by number and rank."""
    counts = Counter(event.text for event in trace.events if event.kind == Kind.STEP)
    model = max(counts, key=lambda text: counts[text], default="")
    found = {rank: _steps(of_rank.events, model) for rank, of_rank in trace.ranks.items()}
    numbers = sorted(set.intersection(*map(set, found.values())))
    if len(numbers) > 4:
        numbers = numbers[1:]  # the first step makes memory and plans that the others use
    return model, {number: {rank: of_rank[number] for rank, of_rank in found.items()} for number in numbers}


def _steps(events: Sequence[Event], model: str) -> dict[int, Step]:
    begins = [event.begin for event in events]
    steps = {}
    for mark in (event for event in events if event.kind == Kind.STEP and event.text == model):
        within = events[bisect_left(begins, mark.begin) : bisect_left(begins, mark.end)]
        phases, own, computed = dict.fromkeys(Phase, 0.0), [0.0] * len(PHASES), mark.end
        for event in within:
            if event.kind == Kind.PHASE:
                lasted = event.end - event.begin
                phases[Phase(event.lane)] += lasted / 1e6
                if event.lane == Phase.WAIT:
                    computed = event.begin
                else:
                    own[event.lane] += max(0, lasted - event.detail) / 1e6
        steps[mark.place] = Step(mark.begin, mark.end, mark.detail, within, phases, own, computed)
    return steps


class Reduction(NamedTuple):
    """The reduction of one bucket on one rank."""

    bucket: Event
    ready: int  # the time when this rank announced it
    took: int  # its time on the rank that waited least in it
    idle: int  # the part of it in which this rank had nothing else to do


def reductions_of(step: Mapping[int, Step]) -> dict[int, list[Reduction]]:
    """The reductions of each rank in one step. Time before the last rank has announced a bucket does not count."""
    events = [event for of_rank in step.values() for event in of_rank.events]
    announced, reduced = by_operation(events, Kind.ANNOUNCED), by_operation(events, Kind.REDUCED)
    found: dict[int, list[Reduction]] = {rank: [] for rank in step}
    for operation, buckets in by_operation(events, Kind.BUCKET).items():
        ready = {event.rank: event.begin for event in announced[operation]}
        last = max(ready.values(), default=0)
        took = min((event.end - event.begin for event in reduced[operation]), default=0)
        for event in reduced[operation]:
            idle = event.end - max(event.begin, last, step[event.rank].computed)
            one = Reduction(buckets[0], ready.get(event.rank, event.begin), took, min(max(0, idle), took))
            found[event.rank].append(one)
    return found
