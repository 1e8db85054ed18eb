"""An optimizer that is gone, in a cycle that gc has not found yet, and the one after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from pool import RankPool
from sharded_training import batch, different_weights, error_of, make, not_divided, sharded, train
from torch import nn

import syncengine


class Run:
    """As trainers are: what they call holds them."""

    def __init__(self, net: nn.Module) -> None:
        self.model, self.optimizer = sharded(net)
        self.callbacks = [self.log]

    def log(self) -> None:
        pass


@contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def follows(how: str) -> list[str]:
    ours, theirs = make(), make()
    with without_gc():
        run = Run(ours)
        train(run.model, run.optimizer, 2)
        theirs.load_state_dict(ours.state_dict())
        del run
        if how == "found on one" and syncengine.rank() == 0:
            gc.collect()
        model, optimizer = sharded(ours, torch.optim.SGD)
        train(model, optimizer, 2)
        divided = not_divided(ours, optimizer)
    train(syncengine.Parallel(theirs), torch.optim.SGD(theirs.parameters(), lr=1e-2), 2)
    return divided + different_weights(ours, theirs)


@pytest.mark.parametrize("how", ["not found", "found on one"])
def test_a_dropped_optimizer_is_no_hindrance(pool: RankPool, how: str):
    assert pool.run(follows, how) == [[]] * 2


def wraps_what_one_has_loaded() -> list[str]:
    """While the optimizer that shares the others' is there."""
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    if syncengine.rank() == 0:
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    text = error_of(lambda: syncengine.Parallel(net))
    optimizer.release()
    again = error_of(lambda: syncengine.Parallel(net)(batch(0)))
    return [text, again]


def test_weights_that_only_some_share_are_named(pool: RankPool):
    for text, again in pool.run(wraps_what_one_has_loaded):
        assert text.startswith("Mismatch: Parallel(Mlp) differs between ranks"), text
        assert "layers.0.weight" in text and "shared by a ShardedOptimizer" in text
        assert again == ""
