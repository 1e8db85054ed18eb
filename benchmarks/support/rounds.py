"""How many rounds a measurement gets."""

import time
from collections.abc import Callable

import torch

from benchmarks.support import ranks


def warm_up(one_round: Callable[[int], object], warmup: int, seconds: float, bounds: tuple[int, int]) -> int:
    """Runs `warmup` rounds; how many more take `seconds`, judged by the last at its slowest rank, within `bounds`."""
    for round_ in range(warmup):
        begin = time.perf_counter()
        one_round(round_)
    per_round = ranks.slowest(torch.tensor(time.perf_counter() - begin)).item()
    least, most = bounds
    return round(min(most, max(least, seconds / per_round)))
