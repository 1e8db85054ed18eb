"""Which backward synchronizes: no_sync, several forwards, a forward that is used twice or not at all."""

from __future__ import annotations

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, Outputs, both, data
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage


@run_on_ranks()
def test_a_parameter_is_used_if_any_of_several_forwards_uses_it():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True, **CAP)
    (model(data(1), True) + model(data(2), False)).sum().backward()
    assert model.sync_stats()["copied_bytes"]["unused"] == 4 * (24 * 24 + 24)  # `never` alone


@run_on_ranks()
def test_a_consumed_forward_raises():
    """DDP would go on with gradients that differ between ranks."""
    model = syncengine.Parallel(Mlp())
    first, second = model(data(1)).sum(), model(data(2)).sum()
    first.backward()
    with pytest.raises(InvalidUsage, match=r"already synchronized.*no_sync"):
        second.backward()
    hidden = syncengine.Parallel(Outputs(lambda a, b: iter([a, b])))  # outputs that can't be found
    for each in (model, hidden):
        loss = sum(each(data())).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(InvalidUsage, match="already synchronized"):
            loss.backward()


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.layer.weight.square().sum()
        return self.layer(x)


@run_on_ranks(gloo=True)
def test_a_penalty_on_weights_made_in_forward_may_have_a_backward_of_its_own():
    """It is no output, and the same on all ranks: what stays local is right."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().mean().backward()
            model.module.penalty.backward()

    both(Penalized, step)
