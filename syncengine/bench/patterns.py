"""Inputs of which each collective has one right result, whatever the order of additions, and what is wrong with one."""

from __future__ import annotations

import torch

# A prime: pieces that end up in each other's place are noticed.
PERIOD = 251

# Values are less, so that sums over 64 ranks are exact. Bytes wrap around.
_BELOW = {torch.bfloat16: 5, torch.float16: 31, torch.int8: 127, torch.uint8: 127}


def values(rank: int, ranks: int, turn: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """One period of the input of a rank, int64; another one in each turn."""
    place = torch.arange(PERIOD) + turn
    if op == "prod":  # one 2 at most among the ranks
        return torch.where(place % (ranks + 1) == rank, 2, 1)
    numbers = (place * 7 + 31 * rank + 1) % PERIOD % _BELOW.get(dtype, PERIOD)
    return numbers % 3 * ranks if op == "avg" else numbers


def reduced(ranks: int, turn: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """One period of the result."""
    everyone = torch.stack([values(rank, ranks, turn, dtype, op) for rank in range(ranks)])
    if op == "prod":
        return everyone.prod(0)
    if op in ("min", "max"):
        return everyone.amin(0) if op == "min" else everyone.amax(0)
    return everyone.sum(0) // ranks if op == "avg" else everyone.sum(0)


def tile(period: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements of the endless pattern, from its element `begin`."""
    turned = period.roll(-(begin % PERIOD)).to(dtype)
    return turned.repeat(count // PERIOD + 1)[:count]


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ; all of them if their number does. NaN is wrong."""
    if result.numel() != expected.numel():
        return expected.numel()
    return int(torch.count_nonzero(result.flatten() != expected))
