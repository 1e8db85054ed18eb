"""Frozen, ignored and complex parameters, and the buckets they are put into."""

from __future__ import annotations

import pytest
from parallel_models import CAP, Branches, Mlp, backwards, both, data
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import SyncError


@run_on_ranks()
def test_freezing_on_one_rank_only_is_an_error_on_all():
    model = syncengine.Parallel(Mlp())
    model(data()).sum().backward()
    if syncengine.rank() == 1:
        model.module.head.bias.requires_grad_(False)
    with pytest.raises(SyncError, match=r"head\.bias requires a gradient on rank 0, but not on rank 1"):
        model(data()).sum().backward()


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
