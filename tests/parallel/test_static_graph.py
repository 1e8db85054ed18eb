"""static_graph=True: unused parameters and hooks that fire several times, learned in the first iteration."""

from __future__ import annotations

import pytest
import torch
from parallel_models import CAP, Branches, Opposite, backwards, both, data
from pool import run_on_ranks
from random_layers import make_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import InvalidUsage, SyncError


@run_on_ranks(gloo=True)
def test_static_graph_can_be_set_later():
    def step(model: nn.Module) -> None:
        model._set_static_graph()
        assert model.static_graph
        backwards(model, 4)

    both(lambda: nn.Sequential(nn.Linear(24, 24), make_layer("repeated")), step)
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        model = wrap(nn.Linear(24, 24))
        backwards(model, 1)
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._set_static_graph()
        again = wrap(nn.Linear(24, 24), static_graph=True)
        with pytest.warns(UserWarning, match="no need to set it again"):
            again._set_static_graph()


@run_on_ranks()
def test_buckets_are_rebuilt_in_ready_order():
    """The order is that of rank 0, and the opposite of that of rank 1."""
    model = syncengine.Parallel(Opposite(3), static_graph=True, **CAP)
    backwards(model, 2)
    assert not model._has_rebuilt_buckets  # the order in which the first iteration reduces says nothing
    backwards(model, 1)
    assert model._has_rebuilt_buckets
    assert model._planning.plan == [[1], [0], [3], [2], [5], [4]]  # each layer's bias comes first


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
@run_on_ranks()
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
