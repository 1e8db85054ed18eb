"""The backward that synchronizes, and parameters that it does not reach, known from its outputs or a static graph."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import CAP, AllBranches, Branches, Mlp, assert_averaged, averages, backwards, both, data, of_both
from pool import run_on_ranks
from random_layers import Layer, linear, make_layer
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, SyncError

Pair = dataclasses.make_dataclass("Pair", ["a", "b"])


@run_on_ranks(gloo=True)
def test_a_backward_for_each_output_of_a_dataclass():
    """It does not go through the sink, so the first of them reaches only a part of what the forward has used."""

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            out = model(data(i))
            out.a.square().mean().backward()
            out.b.square().mean().backward()

    make = partial(Layer, lambda self, x: Pair(self.a(x), self.b(x)))
    both(lambda: make(a=linear(), b=linear()), step, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_a_loss_that_uses_no_parameter_on_one_rank():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    module, x = model.module, data().requires_grad_()
    if syncengine.rank() == 0:
        module.forward = lambda x, left: x * 1
    model(x, True).sum().backward()
    used = nn.ModuleList([module.stem, module.left])
    for parameter, average in zip(used.parameters(), averages(used, module(x, True).sum()), strict=True):
        assert torch.equal(parameter.grad, average)
    assert all(p.grad is None for p in (*module.right.parameters(), *module.never.parameters()))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
@run_on_ranks(gloo=True)
def test_the_reducer_says_which_parameters_are_used(find_unused: bool, same: bool):
    def step(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        for i in range(6):
            left = same or (syncengine.rank() + i) % 2 == 0
            model(data(i), left or not find_unused).sum().backward()
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
        assert (module.left.weight.grad is None) == drops
        trained = [module.stem, module.right] if drops else [module.stem, module.right, module.left]
        kept = 0 if drops else module(data(0), True).sum()
        assert_averaged(nn.ModuleList(trained), kept + module(data(1), False).sum())


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
    loss = model(data()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidUsage, match="already synchronized"):
        loss.backward()


@run_on_ranks(gloo=True)
def test_a_penalty_on_weights_made_in_forward_may_have_a_backward_of_its_own():
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.layer.weight.square().sum()
        return self.layer(x)

    def step(model: nn.Module) -> None:
        for i in range(3):
            model.zero_grad()
            model(data(i)).square().mean().backward()
            model.module.penalty.backward()  # no output, and the same on all ranks: what stays local is right

    both(lambda: Layer(forward, layer=nn.Linear(24, 3)), step)


@run_on_ranks(gloo=True)
def test_static_graph_can_be_set_later():
    def step(model: nn.Module) -> None:
        model._set_static_graph()
        assert model.static_graph
        backwards(model, 4)

    both(lambda: nn.Sequential(nn.Linear(24, 24), make_layer("repeated")), step)


@run_on_ranks()
def test_memory_that_others_hold_is_left_to_them():
    """The first iteration averages late, when autograd has long let go of what shares memory with gradients."""

    def share(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x.requires_grad_() + self.bias.view(5, 24)
        self.hidden.retain_grad()
        return self.hidden

    model = syncengine.Parallel(Layer(share, bias=nn.Parameter(torch.randn(5, 24))), static_graph=True)
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
    text = "training graph has changed in this iteration"
    with pytest.raises(InvalidUsage if first else SyncError, match=text) as error:
        if more:
            model(data(3), not first).sum().backward()
        else:
            stem, left = model.module.stem, model.module.left
            model.module.forward = lambda x, _: stem(x) if first else left(stem(x))
            for _ in range(2):
                model(data(3), True).sum().backward()
    assert re.search(r"right\.weight|right\.bias" if more else r"left\.weight|right\.bias", str(error.value))
