"""Traces that no run has made: what ranks would record whose phases take so long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncengine.tracing import Event, Kind, Phase, RankTrace, Trace

MS = 1_000_000
MODEL = "Parallel(Net)"


@dataclass
class Job:
    """What its ranks do. Milliseconds of a step: by rank, phase and step."""

    ranks: int = 2
    steps: int = 20
    input: float = 2.0
    forward: float = 10.0
    backward: float = 20.0
    optimizer: float = 3.0
    reductions: Sequence[float] = (1.0, 1.0, 2.0)  # of each bucket, in the order in which they are ready
    delay: Callable[[int, Phase, int], float] = lambda rank, phase, step: 0.0
    copies: dict[str, int] = field(default_factory=dict)
    lazy: bool = False  # nothing is reduced while a rank computes


def make(job: Job) -> Trace:
    """In each step all ranks leave the optimizer's end, compute, and wait for the last average."""
    events: dict[int, list[Event]] = {rank: [] for rank in range(job.ranks)}

    def add(rank: int, kind: Kind, begin: float, end: float, **fields: object) -> None:
        blank = {"group": 0, "lane": 0, "place": 0, "epoch": 0, "detail": 0, "text": ""}
        events[rank].append(Event(rank, kind, round(begin * MS), round(end * MS), **{**blank, **fields}))  # type: ignore[arg-type]

    now = [1000.0] * job.ranks  # the end of the last synchronized backward
    for step in range(1, job.steps + 1):
        begun = list(now)
        ready: list[list[float]] = []
        computed = []
        for rank in range(job.ranks):
            at = now[rank]
            for phase, ms in (
                (Phase.OPTIMIZER, job.optimizer),
                (Phase.INPUT, job.input),
                (Phase.FORWARD, job.forward),
                (Phase.BACKWARD, job.backward),
            ):
                end = at + ms + job.delay(rank, phase, step)
                add(rank, Kind.PHASE, at, end, lane=phase, place=step)
                if phase == Phase.BACKWARD:
                    count = len(job.reductions)
                    ready.append([at + (end - at) * (i + 1) / count for i in range(count)])
                at = end
            computed.append(at)
        free = max(computed) if job.lazy else 0.0
        for i, took in enumerate(job.reductions):
            last = max(times[i] for times in ready)
            begin = max(free, last)
            free = begin + took
            for rank in range(job.ranks):
                own = ready[rank][i]
                name = f"{MODEL}\n{i}\nlayers.{i}.weight\nlayers.{i}.bias"
                add(rank, Kind.BUCKET, own - 0.1, own, lane=1, place=i, epoch=step, detail=4 << 20, text=name)
                add(rank, Kind.ANNOUNCED, own, own, lane=1, place=i, epoch=step, detail=4 << 20)
                add(rank, Kind.SCHEDULED, last, last, lane=1, place=i, epoch=step)
                add(rank, Kind.REDUCED, begin, free, lane=1, place=i, epoch=step, detail=4 << 20)
        for rank in range(job.ranks):
            end = max(free, computed[rank])
            waited = round((end - computed[rank]) * MS)
            add(rank, Kind.PHASE, computed[rank], end, lane=Phase.WAIT, place=step, detail=waited)
            add(rank, Kind.STEP, begun[rank], end, place=step, detail=len(job.reductions) * 4 << 20, text=MODEL)
            for reason, size in job.copies.items():
                add(rank, Kind.COPY, end, end, place=step, detail=size, text=reason)
            now[rank] = end
    ranks = {}
    for rank, of_rank in events.items():
        of_rank.sort(key=lambda event: (event.begin, -event.end))
        ranks[rank] = RankTrace(rank, 0, {"rank": rank}, True, len(of_rank), of_rank)
    return Trace(ranks, job.ranks, {0: 0.0})
