"""Frozen, ignored and complex parameters, and the buckets they are put into."""

from __future__ import annotations

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, backwards, both, data, of_both
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import SyncError


@run_on_ranks(timeout=20.0)
def test_freezing_on_one_rank_only_is_an_error_on_all():
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        model.module.head.bias.requires_grad_(False)
    with pytest.raises(SyncError) as error:
        model(data()).sum().backward()
    text = str(error.value)
    assert "head.bias requires a gradient on rank 0, but not on rank 1" in text


@run_on_ranks()
def test_ignored_parameters_stay_local():
    rank = syncengine.rank()
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.bias.fill_(rank)
    syncengine.Parallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model = syncengine.Parallel(module)
    assert module.bias.item() == rank
    (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
    assert module.bias.grad.item() == rank + 1
    assert module.weight.grad.tolist() == [[1.5, 1.5]]


class Lazy(nn.Module):
    """Gradients whose memory holds the conjugate, or the negative."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.full((24,), 1 + 2j))
        self.imaginary = nn.Parameter(torch.full((1,), 3.0))
        self.always = nn.Parameter(torch.full((24,), 1 - 1j))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        result = x * (1 + 1j) * self.always
        if use:
            result = (
                result + x * (2 - 1j) * self.waves.conj() + x * torch.complex(torch.zeros(1), self.imaginary).conj()
            )
        return result.sum().abs()


def lazy_gradients(model: nn.Module, branch: bool) -> list[torch.Tensor]:
    found = []
    for i in range(3):
        if i:
            model.zero_grad()
            with model.no_sync():
                model(data(i)[0], True).backward()  # so what comes next is added to a lazy gradient
        model(data(i)[0], branch).backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


@run_on_ranks(gloo=True)
def test_gradients_that_are_lazily_conjugated_or_negated():
    for branch in (True, syncengine.rank() == 0):
        ours, theirs = of_both(lambda m, branch=branch: lazy_gradients(m, branch), Lazy, find_unused_parameters=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)


@run_on_ranks(gloo=True)
def test_a_tied_parameter_of_which_one_name_is_ignored():
    def make(name: str) -> nn.Module:
        module = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
        module[2].weight = module[0].weight
        module._ddp_params_and_buffers_to_ignore = [name]
        return module

    for name in ("0.weight", "2.weight"):
        both(lambda name=name: make(name), backwards)
    model = syncengine.Parallel(make("0.weight"))
    assert model._model.names == ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


@run_on_ranks()
def test_buckets_follow_the_cap_and_the_order_of_readiness():
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    default = model.sync_stats()["buckets"]
    small = syncengine.Parallel(Mlp(), **CAP)
    assert not small._has_rebuilt_buckets
    for _ in range(2):
        small(data()).sum().backward()
    assert small._has_rebuilt_buckets
    assert small.sync_stats()["buckets"] == len(list(small.parameters())) > default > 1
    assert small.reducer.ready_order()[0] > small.reducer.ready_order()[-1]  # the head's gradients come first


@run_on_ranks()
def test_buckets_are_rebuilt_with_unused_parameters_too():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model(data(), True).sum().backward()
    assert model._has_rebuilt_buckets


class Odd(nn.Module):
    """Tensors without elements, without dimensions and of rare dtypes, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        mine = float(syncengine.rank())  # another value on each rank
        self.empty = nn.Parameter(torch.zeros(0, 24))
        self.scale = nn.Parameter(torch.tensor(2.0 + mine))
        self.linear = nn.Linear(24, 3)
        self.indices = nn.Parameter(torch.arange(4) + int(mine), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, mine == 0]), requires_grad=False)
        self.register_buffer("missing", None)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("switch", torch.tensor(mine == 0))
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex64) * mine)
        self.register_buffer("small", torch.full((3,), mine).half())
        self.register_buffer("hidden", torch.full((3,), mine), persistent=False)
        self.register_buffer("strided", torch.full((4, 6), mine)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x) * self.scale, x @ self.empty.t()], 1) + self.hidden.sum()


@run_on_ranks(gloo=True)
def test_odd_tensors():
    def step(model: nn.Module) -> list[torch.Tensor]:
        return [*backwards(model), *(b.clone() for b in model.buffers())]

    for options in ({}, CAP, {"find_unused_parameters": True}, {"static_graph": True}):
        both(Odd, step, **options)
