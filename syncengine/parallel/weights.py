"""A weighted mean of gradients, for batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage


def check_weight(weight: float) -> float:
    """A number that a gradient can count."""
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InvalidUsage(f"weight({weight!r}): give a finite number of at least 0, such as the number of samples")
    return value


class WeightExchange:
    """Every rank's weight, exchanged while the forward computes."""

    def __init__(self, communicator: Communicator, weight: float) -> None:
        self._all = torch.empty(communicator.size, dtype=torch.float64, device="cpu")
        own = torch.tensor([weight], dtype=torch.float64, device="cpu")
        self._work = communicator.all_gather(self._all, own, async_op=True)

    def wait(self) -> list[float]:
        """The weights, by rank."""
        self._work.wait()
        weights: list[float] = self._all.tolist()
        return weights


def averaging(weights: Sequence[float], rank: int) -> tuple[float, float]:
    """Divisor of the sum and factor on this rank's gradient, which make it a mean with these weights.

    Factors are at most 1, so nothing overflows that did not before; equal weights give exactly (number of ranks, 1).
    """
    total, largest = math.fsum(weights), max(weights)
    if not 0.0 < total < math.inf:
        raise InvalidUsage(f"weight() is {total:g} in sum over all ranks: there is no mean with such weights")
    return total / largest, weights[rank] / largest
