"""Frozen, ignored and complex parameters, and the buckets they are put into."""

from __future__ import annotations

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, Opposite, backwards, both, data
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
    assert len(list(model.parameters())) > model.sync_stats()["buckets"] > 1
    layer = sum(p.nbytes for p in nn.Linear(24, 24).parameters()) / 2**20
    for cap, buckets in (
        (CAP["bucket_cap_mb"], [[1], [0], [3], [2], [5], [4]]),
        (layer, [[1, 0], [3, 2], [5, 4]]),
        (2 * layer, [[1, 0, 3, 2], [5, 4]]),
    ):
        small = syncengine.Parallel(Opposite(3), bucket_cap_mb=cap)
        assert not small._has_rebuilt_buckets
        for _ in range(2):
            small(data()).sum().backward()
        assert small._has_rebuilt_buckets
        assert small._planning.plan == buckets  # in the order of rank 0, each layer's bias first
        assert small.sync_stats()["buckets"] == len(buckets)
        syncengine.all_gather(orders := torch.empty(2, 6, dtype=torch.int64), torch.tensor(small.reducer.ready_order()))
        assert orders.tolist() == [[1, 0, 3, 2, 5, 4], [5, 4, 3, 2, 1, 0]]


@run_on_ranks()
def test_buckets_are_rebuilt_with_unused_parameters_too():
    model = syncengine.Parallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model(data(), True).sum().backward()
    assert model._has_rebuilt_buckets
