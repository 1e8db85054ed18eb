"""Ways to run backward: checkpoints, threads, several models, create_graph; any order of readiness."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from parallel_models import CAP, Mlp, averages, both, data, different_bits, gradients
from pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


@run_on_ranks(gloo=True)
def test_ranks_may_be_ready_in_opposite_orders():
    """Buckets complete in any order: ranks that wait for each other's next bucket would hang."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(24, 200) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = list(self.layers)[:: 1 if syncengine.rank() == 0 else -1]
            return sum(layer(x) for layer in order)

    torch.manual_seed(0)
    module = Crossed()
    expected = averages(module, module(data()).square().sum())
    model = syncengine.Parallel(module, **CAP)
    for _ in range(3):
        model.zero_grad()
        model(data()).square().sum().backward()
        for grad, mean in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(grad, mean)


@run_on_ranks(gloo=True)
def test_two_models_in_one_backward():
    results = []
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        torch.manual_seed(0)
        first, second = wrap(nn.Linear(24, 24)), wrap(Mlp(), bucket_cap_mb=0.1)
        for i in range(3):
            (second(first(data(i))).sum() + first(data(i + 10)).square().sum()).backward()
        results.append(gradients(first) + gradients(second))
    assert not different_bits(*results)


@run_on_ranks(world=4)
def test_a_sub_communicator():
    rank = syncengine.rank()
    pair = syncengine.default_communicator().split([0, 2] if rank % 2 == 0 else [1, 3])
    model = syncengine.Parallel(nn.Linear(2, 1, bias=False), process_group=pair)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0] if rank % 2 == 0 else [2.0, 2.0]]


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


@run_on_ranks(gloo=True)
def test_a_checkpoint_around_the_wrapper():
    def step(model: nn.Module, reentrant: bool) -> None:
        for i in range(3):
            model.zero_grad()
            checkpoint(model, data(i).requires_grad_(), use_reentrant=reentrant).square().sum().backward()

    for reentrant in (True, False):
        both(Mlp, partial(step, reentrant=reentrant))
    both(Mlp, partial(step, reentrant=False), find_unused_parameters=True)
