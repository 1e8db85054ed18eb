"""Uneven inputs: a rank that has run out of batches still updates its part of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import batch, different_weights, error_of, make, not_divided, plain, sharded, train
from torch import nn
from torch.distributed.algorithms.join import Join

import syncengine


def uneven(model: nn.Module, optimizer: torch.optim.Optimizer, context: Any, batches: int) -> None:
    """The first rank has fewest batches; gradients are clipped, and the rate changes."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    train(model, optimizer, 1)
    with context:
        for step in range(1, batches + 2 * syncengine.rank()):
            optimizer.zero_grad()
            (model(batch(step)).square().mean() * 100).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("torchs", [False, True], ids=["model.join", "torch's Join"])
@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks(gloo=True)
def test_a_rank_without_batches_updates_its_part(torchs: bool, world: int):
    nets = [make(), make()]
    for net, kind in zip(nets, [sharded, plain], strict=True):
        model, optimizer = kind(net)
        together = [model, optimizer] if kind is sharded else [model]
        uneven(model, optimizer, Join(together) if torchs else model.join(), 4)
    return different_weights(*nets)


def goes_on_after_join() -> list[str]:
    net = make()
    model, optimizer = sharded(net)
    grads = [None]
    with model.join():
        train(model, optimizer, 2 + syncengine.rank())
        grads = [p.grad.clone() for p in net.parameters()]
    kept = all(torch.equal(a, p.grad) for a, p in zip(grads, net.parameters(), strict=True))
    optimizer.param_groups[0]["lr"] = 1e-2
    return [error_of(lambda: train(model, optimizer, 2)), str(kept)]


def test_training_goes_on_after_it(pool: RankPool):
    assert pool.run(goes_on_after_join) == [["", "True"]] * 2


@run_on_ranks(gloo=True)
def test_torchs_join_needs_the_optimizer_too():
    model, optimizer = sharded(make())
    train(model, optimizer, 1)
    join = Join([model])
    text = error_of(lambda: train(model, optimizer, 1))
    del join
    assert "Join([model, optimizer])" in text


@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks()
def test_a_rank_without_any_batch(world: int):
    """The last rank has no batch before or in the context; the first has most."""
    nets, same = [make(), make()], make()
    for net, kind in zip(nets, [sharded, plain], strict=True):
        model, optimizer = kind(net)
        with model.join():
            train(model, optimizer, 2 * (world - 1 - syncengine.rank()))
        if kind is sharded:
            same.load_state_dict(net.state_dict())
            train(model, optimizer, range(9, 11))
    return different_weights(same, nets[1])  # whose optimizers have made different numbers of steps by then


@pytest.mark.parametrize("torchs", [False, True], ids=["model.join", "torch's Join"])
@pytest.mark.parametrize("world", [2, 3])
@run_on_ranks(gloo=True)
def test_parameters_unfrozen_when_a_rank_has_joined(torchs: bool, world: int):
    """On the ranks that still train, after the first one has joined; the others do it after the context."""
    nets, same = [make(), make()], make()
    wrong = []
    for net, kind in zip(nets, [sharded, plain], strict=True):
        net.head.requires_grad_(False)
        model, optimizer = kind(net, weight_decay=0.1)
        together = [model, optimizer] if kind is sharded else [model]
        with Join(together) if torchs else model.join():
            train(model, optimizer, 1)
            if syncengine.rank() > 0:
                train(model, optimizer, range(1, 3))
                net.head.requires_grad_(True)
                train(model, optimizer, range(3, 5))
        net.head.requires_grad_(True)
        if kind is sharded:
            same.load_state_dict(net.state_dict())
            wrong = not_divided(net, optimizer)
            train(model, optimizer, range(9, 11))
    return wrong + different_weights(same, nets[1])
