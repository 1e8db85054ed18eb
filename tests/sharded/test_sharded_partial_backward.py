"""Backwards of this rank alone, beside those that average: whether gradients are averages after them."""

from __future__ import annotations

import pytest
import torch
from pool import RankPool
from sharded_training import batch, different_weights, error_of, make, plain, sharded

import syncengine


def backward_under_no_sync(way: str, ranks: list[int]) -> tuple[str, list[str]]:
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    text = ""
    for net, wrapped, one in ((ours, model, optimizer), (theirs, reference, plain_optimizer)):
        for step in range(3):
            one.zero_grad()
            wrapped(batch(step)).square().mean().backward()
            probe = batch(7).requires_grad_()
            if syncengine.rank() in ranks:
                with wrapped.no_sync():
                    loss = wrapped(probe).sum()
                    if way == "grad":
                        torch.autograd.grad(loss, probe)
                    elif way == "grad of a parameter":
                        torch.autograd.grad(loss, net.head.weight)
                    elif way == "inputs":
                        loss.backward(inputs=[probe])
                    elif way == "inputs with a parameter":
                        loss.backward(inputs=[probe, net.head.weight])
                    else:
                        loss.backward()
            text = text or error_of(one.step)
    return text, different_weights(ours, theirs)


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("way", ["grad", "grad of a parameter", "inputs"])
def test_what_accumulates_nothing_leaves_averages(pool: RankPool, way: str, ranks: list[int]):
    assert pool.run(backward_under_no_sync, way, ranks) == [("", [])] * 2


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("way", ["inputs with a parameter", "all"])
def test_what_accumulates_is_refused(pool: RankPool, way: str, ranks: list[int]):
    for text, _ in pool.run(backward_under_no_sync, way, ranks):
        assert "the gradients of Mlp are not averages: the last backward was this rank's own (no_sync)" in text
