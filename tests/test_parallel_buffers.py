"""Buffers are rank 0's at every forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_models import both, data
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import since_2_13

import syncengine
from syncengine.errors import InvalidUsage


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += syncengine.rank() + 1
        self.steps = self.steps + syncengine.rank() + 1  # a new tensor each time
        return self.weight * x.sum()


@since_2_13
@run_on_ranks(gloo=True)
def test_buffers_are_rank_0s_at_every_forward():
    def seen(**options: Any) -> list[list[float]]:
        states = []
        for wrap in (syncengine.Parallel, DistributedDataParallel):
            model = wrap(Counter(), **options)
            state = []
            for i in range(6):
                if i == 2:
                    with model.no_sync():
                        model(data(i)).backward()
                elif i == 4:
                    with torch.no_grad():
                        model(data(i))
                else:
                    model(data(i)).backward()
                state += [*model.module.seen.tolist(), model.module.steps.item()]
            states.append(state)
        assert states[0] == states[1]
        return states[0]

    synced, local = seen(), seen(forward_sync_buffers=False)
    assert (synced == local) == (syncengine.rank() == 0)


@run_on_ranks()
def test_broadcast_buffers_is_deprecated_but_works():
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        model = syncengine.Parallel(Counter(), broadcast_buffers=False)
    assert model.broadcast_buffers is False
    assert not model.will_sync_module_buffers()


@run_on_ranks()
def test_a_buffer_that_nothing_can_be_copied_into_is_named():
    """DDP raises without a name. Rank 0 alone would see nothing wrong."""
    module = nn.Linear(24, 2)
    module.register_buffer("mask", torch.ones(1).expand(5))
    with pytest.raises(InvalidUsage, match=r"mask of shape \(5,\) and strides \(0,\).*clone\(\) it"):
        syncengine.Parallel(module)
    module.mask = torch.arange(5).expand(1, -1)  # shares nothing
    syncengine.Parallel(module)


class Scaled(nn.Module):
    """Backward needs the buffer as it was in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.register_buffer("scale", torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@since_2_13
@run_on_ranks(gloo=True)
def test_a_buffer_that_backward_needs_may_be_synchronized_before():
    def step(model: nn.Module) -> None:
        for _ in range(2):
            sum(model(data(i)).square().sum() for i in range(2)).backward()

    both(Scaled, step)
