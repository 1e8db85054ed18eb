"""static_graph=True: unused parameters and hooks that fire several times, learned in the first iteration."""

from __future__ import annotations

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, backwards, both, data
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, SyncError


class Repeated(nn.Module):
    """One layer in three checkpoints, another in two, one in none, one unused."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.third, self.never = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.first, self.second, self.first, self.second, self.first):
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return self.third(x)


@run_on_ranks(gloo=True)
def test_static_graph_can_be_set_later():
    def step(model: nn.Module) -> None:
        model._set_static_graph()
        assert model.static_graph
        backwards(model, 4)

    both(Repeated, step)
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        model = wrap(nn.Linear(24, 24))
        backwards(model, 1)
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._set_static_graph()
        again = wrap(nn.Linear(24, 24), static_graph=True)
        with pytest.warns(UserWarning, match="no need to set it again"):
            again._set_static_graph()


@run_on_ranks()
def test_the_first_iteration_has_the_averages_too():
    torch.manual_seed(0)
    module = Repeated()
    expected = torch.zeros(24, 24)
    for rank in range(2):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
        module(x).square().mean().backward()
        expected += module.first.weight.grad / 2
        module.zero_grad()
    model = syncengine.Parallel(module, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        model(data()).square().mean().backward()
        torch.testing.assert_close(module.first.weight.grad, expected)
        assert module.never.weight.grad is None


@run_on_ranks()
def test_buckets_are_rebuilt_in_ready_order():
    model = syncengine.Parallel(Mlp(), static_graph=True, **CAP)
    backwards(model, 2)
    assert not model._has_rebuilt_buckets  # the order in which the first iteration reduces says nothing
    backwards(model, 1)
    assert model._has_rebuilt_buckets


@run_on_ranks()
def test_memory_that_others_hold_is_left_to_them():
    """The first iteration averages late, when autograd has long let go of what shares memory with gradients."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(5, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = x.requires_grad_() + self.bias.view(5, 24)
            self.hidden.retain_grad()
            return self.hidden

    model = syncengine.Parallel(Shares(), static_graph=True)
    for i in range(3):
        model.zero_grad()
        (model(data(i)) * (syncengine.rank() + 1)).sum().backward()
        assert model.module.hidden.grad.unique().tolist() == [syncengine.rank() + 1]
        assert model.module.bias.grad.unique().tolist() == [1.5]


@pytest.mark.parametrize("more", [True, False])
@run_on_ranks(timeout=20.0)
def test_a_graph_that_changes_is_an_error(more: bool):
    model = syncengine.Parallel(Branches(), static_graph=True, **CAP)
    first = syncengine.rank() == 1
    for i in range(2):
        model(data(i), True).sum().backward()
    with pytest.raises(SyncError) as error:
        if more:
            model(data(3), not first).sum().backward()
        else:
            stem, left = model.module.stem, model.module.left
            model.module.forward = lambda x, _: stem(x) if first else left(stem(x))
            for _ in range(2):
                model(data(3), True).sum().backward()
    if first:
        assert error.type is InvalidUsage
    text = str(error.value)
    assert "training graph has changed in this iteration" in text
    assert ("right.weight" if more else "left.weight") in text or "right.bias" in text
