"""The size of buckets, from when gradients are ready and how fast this job's all-reduce is.

Large buckets wait for their last gradient, small ones pay the cost of starting an all-reduce more often. So one rank
chooses the cap with which, by its own measurements, all averages are ready first, and broadcasts it. Only where buckets
change no bits.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from syncengine._C import Communicator

KIB, MIB = 1024, 1024 * 1024

CAPS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
SAMPLES = 2  # backwards whose gradients are timed, after the first, which still allocates
_WORTHWHILE = 0.95  # of the time with the usual cap: measurements are not better than that
_SIZES = (16 * KIB, 128 * KIB, 512 * KIB, MIB)  # that are timed, in bytes; larger ones would raise the peak of memory
_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """How long an all-reduce takes: seconds for some sizes in bytes, both ascending."""

    sizes: Sequence[int]
    seconds: Sequence[float]

    def cost(self, size: int) -> float:
        """Seconds for ``size`` bytes: on the line through its neighbors, or the last two; at least the first."""
        at = min(bisect.bisect_left(self.sizes, size), len(self.sizes) - 1)
        if at == 0:
            return self.seconds[0]
        (x0, x1), (y0, y1) = self.sizes[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def measure_link(communicator: Communicator) -> Link:
    """Times all-reduces. Collective; some tens of milliseconds.

    For each model anew: what one rank remembers, another may have dropped together with its models.
    """
    memory = torch.zeros(_SIZES[-1] // 4, dtype=torch.float32, device="cpu")
    seconds = []
    for size in _SIZES:
        part = memory[: size // 4]
        times = []
        for _ in range(1 + _REPEATS):
            communicator.barrier()
            start = time.perf_counter()
            communicator.all_reduce(part)
            times.append(time.perf_counter() - start)
        seconds.append(min(times[1:]))
    return Link(_SIZES, seconds)


def end_of_backward(ready: Sequence[float], sizes: Sequence[int], link: Link, overlaps: bool) -> float:
    """When the last average is ready. Of each bucket: when its last gradient is ready, and its size.

    ``overlaps``: whether all-reduces run while backward computes; otherwise they add to its time.
    """
    if not overlaps:
        return max(ready) + sum(link.cost(size) for size in sizes)
    end = 0.0
    for at, size in sorted(zip(ready, sizes, strict=True)):
        end = max(end, at) + link.cost(size)
    return end


def choose_cap(
    usual: int,
    plan_of: Callable[[int], Sequence[Sequence[int]]],
    ready: dict[int, float],
    sizes: Sequence[int],
    link: Link,
    overlaps: bool,
) -> int:
    """The cap with which backward ends first; ``usual`` unless another is clearly better.

    ``plan_of(cap)`` gives the buckets, ``ready`` when the gradient of each parameter is, and ``sizes`` their bytes.
    """

    def end_with(cap: int) -> float:
        plan = plan_of(cap)
        last = [max(ready.get(i, 0.0) for i in bucket) for bucket in plan]
        return end_of_backward(last, [sum(sizes[i] for i in bucket) for bucket in plan], link, overlaps)

    best = min(CAPS, key=end_with)
    return best if end_with(best) < _WORTHWHILE * end_with(usual) else usual


def can_overlap(ranks: int, between_hosts: bool) -> bool:
    """Whether all-reduces run while backward computes.

    They do between hosts, where the network takes the time, and where each rank has a second processor, which the
    engine requires to work in the background.
    """
    return between_hosts or len(os.sched_getaffinity(0)) >= 2 * ranks


@dataclass
class Tuner:
    """Collects when gradients are ready, over a few backwards."""

    samples: list[dict[int, float]] = field(default_factory=list)

    def note(self, order: Sequence[int], stamps: Sequence[int], start: int) -> bool:
        """Adds one backward: parameters and times in nanoseconds, in the order of readiness. True once it is enough."""
        times = {i: (at - start) / 1e9 for i, at in zip(order, stamps, strict=False)}
        self.samples.append(times)
        return len(self.samples) >= SAMPLES

    def ready(self) -> dict[int, float]:
        """Of each parameter the earliest time: disturbances only make a backward later."""
        earliest: dict[int, float] = {}
        for sample in self.samples:
            for i, at in sample.items():
                earliest[i] = min(at, earliest.get(i, at))
        return earliest
