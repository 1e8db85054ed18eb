"""A weighted mean of gradients, for batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from syncengine._C import Communicator, Reducer
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.parallel.replication import fail_all


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
    """Every rank's weight, exchanged while the forward computes.

    ``expects_errors``: the first time within a forward. A rank that raises there before it has given its weight does
    not know that the others wait for it; so they listen for its error first.
    """

    def __init__(self, communicator: Communicator, reducer: Reducer, weight: float, expects_errors: bool) -> None:
        self._communicator, self._reducer = communicator, reducer
        if expects_errors:
            reducer.expect_weights()
        self._all = torch.empty(communicator.size, 2, dtype=torch.float64, device="cpu")
        own = torch.tensor([weight, expects_errors], dtype=torch.float64, device="cpu")
        self._work = communicator.all_gather(self._all.view(-1), own, async_op=True)

    def wait(self) -> list[float]:
        """The weights, by rank."""
        self._reducer.await_weights()
        self._work.wait()
        weights: list[float] = self._all[:, 0].tolist()
        expects: list[float] = self._all[:, 1].tolist()
        if len(set(expects)) > 1:
            within, before = (self._communicator.global_ranks[expects.index(flag)] for flag in (1.0, 0.0))
            text = f"rank {within} called weight() within the forward, but rank {before} before it"
            fail_all(self._communicator, Mismatch(f"{text}: do the same on every rank"))
        return weights


def averaging(weights: Sequence[float], rank: int) -> tuple[float, float]:
    """Divisor of the sum and factor on this rank's gradient, which make it a mean with these weights.

    Factors are at most 1, so nothing overflows that did not before; equal weights give exactly (number of ranks, 1).
    """
    total, largest = math.fsum(weights), max(weights)
    if not 0.0 < total < math.inf:
        raise InvalidUsage(f"weight() is {total:g} in sum over all ranks: there is no mean with such weights")
    return total / largest, weights[rank] / largest
