"""Ways to run backward: checkpoints, threads, several models, create_graph; any order of readiness."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from parallel_models import CAP, Mlp, Opposite, backwards, both, data, different_bits, gradients
from pool import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import SyncError


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant).tanh()
        return self.third(checkpoint(self.second, x, use_reentrant=self.reentrant).tanh())


@pytest.mark.parametrize("alone", [False, True])
@run_on_ranks()
def test_a_parameter_in_two_reentrant_checkpoints_raises(alone: bool):
    """Alone, it is averaged when the first of them has run backward: within the outer backward."""
    module = Checkpointed(True)
    module.second = module.first
    if alone:
        module.third = nn.Identity()
    with pytest.raises(SyncError, match="ready only once"):  # the other's may come at any time
        model = syncengine.Parallel(module, **({} if alone else CAP))
        model(data()).sum().backward()


@pytest.mark.usefixtures("kinds_of_buckets")
@run_on_ranks(gloo=True)
def test_ranks_may_be_ready_in_opposite_orders():
    """Buckets complete in any order, and are reduced in one: who waits for another's next bucket would hang."""
    for options in ({}, CAP):
        both(partial(Opposite, 7), backwards, **options)
    model = syncengine.Parallel(Opposite(7), **CAP)
    backwards(model)
    assert model.sync_stats()["buckets"] == 14
    syncengine.all_gather(orders := torch.empty(2, 14, dtype=torch.int64), torch.tensor(model.reducer.ready_order()))
    assert not torch.equal(*orders)


@run_on_ranks()
def test_create_graph_gives_averages_too():
    """DDP can't: it writes its bucket in place where autograd forbids it."""
    results = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        model = syncengine.Parallel(nn.Linear(24, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about reference cycles
            for i in range(2):
                model(data(i)).square().sum().backward(create_graph=create_graph)
        results.append(gradients(model))
    assert not different_bits(*results)


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_a_checkpoint_around_the_wrapper():
    def step(model: nn.Module, reentrant: bool) -> None:
        for i in range(3):
            model.zero_grad()
            checkpoint(model, data(i).requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    for reentrant in (True, False):
        both(Mlp, partial(step, reentrant=reentrant))
    both(Mlp, partial(step, reentrant=False), find_unused_parameters=True)
