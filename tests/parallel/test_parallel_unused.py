"""Parameters that a backward does not reach, and the outputs from which that is found out."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Branches, Outputs, assert_averaged, both, data, of_both
from pool import run_on_ranks
from torch import nn

import syncengine


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


@run_on_ranks(gloo=True)
def test_a_backward_for_each_output_of_a_dataclass():
    """It does not go through the sink, so the first of them reaches only a part of what the forward has used."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            out = model(data(i))
            out.a.square().mean().backward()
            out.b.square().mean().backward()

    both(partial(Outputs, Pair), step, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_a_loss_that_uses_no_parameter_on_one_rank():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    module = model.module
    x = data().requires_grad_()
    used = [*module.stem.parameters(), *module.left.parameters()]
    of_rank_1 = [grad.clone() for grad in torch.autograd.grad(module(x, True).sum(), used)]
    if syncengine.rank() == 0:
        module.forward = lambda x, left: x * 1
    model(x, True).sum().backward()
    for parameter, grad in zip(used, of_rank_1, strict=True):
        dist.broadcast(grad, 1)
        assert torch.equal(parameter.grad, grad / 2)
    assert all(p.grad is None for p in (*module.right.parameters(), *module.never.parameters()))


class AllBranches(Branches):
    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return super().forward(x, True) + super().forward(x, False) + self.never(x)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
@run_on_ranks(gloo=True)
def test_the_reducer_says_which_parameters_are_used(find_unused: bool, same: bool):
    """What the reducer says of it, after each step."""

    def step(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        for i in range(6):
            left = same or (syncengine.rank() + i) % 2 == 0
            model(data(i), left).sum().backward()
            used = model.reducer._get_local_used_map()
            seen += [None if used is None else used.tolist(), model.reducer._ddp_graph_static()]
        return seen

    ours, theirs = of_both(step, Branches if find_unused else AllBranches, find_unused_parameters=find_unused)
    assert ours == theirs


@run_on_ranks(gloo=True)
def test_a_gradient_that_was_accumulated_and_dropped_counts_for_nothing():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    module = model.module
    for drops in (True, False):
        model.zero_grad()
        with model.no_sync():
            model(data(0), True).sum().backward()
        if drops:
            model.zero_grad()
        model(data(1), False).sum().backward()
        if drops:
            assert module.left.weight.grad is None
            assert_averaged(nn.ModuleList([module.stem, module.right]), module(data(1), False).sum())
        else:
            trained = nn.ModuleList([module.stem, module.left, module.right])
            assert_averaged(trained, module(data(0), True).sum() + module(data(1), False).sum())
