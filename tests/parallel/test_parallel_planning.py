"""When buckets are planned, and how large they are; a forward that one rank makes alone is its own."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from parallel_models import Mlp, backwards, both, data, gradients, small
from pool import RankPool, run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import Mismatch, Timeout
from syncengine.parallel.buckets import BucketPlanner

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("options", "numerics", "cap", "counts"),
    [
        ({}, "rank_order", MIB, [3] * 6),
        ({"bucket_cap_mb": 3}, "rank_order", 3 * MIB, [1] * 6),
        ({}, "ring", 25 * MIB, [1] + [2] * 5),  # as DDP: all in one, then 1 MiB first
    ],
    ids=["default", "given", "ring"],
)
@run_on_ranks()
def test_the_size_of_buckets_is_fixed(options: dict[str, Any], numerics: str, cap: int, counts: list[int]):
    """The cap, in bytes, and the number of buckets in each step."""
    model = syncengine.Parallel(Mlp(), **options)
    for count in counts:
        backwards(model, 1)
        assert model.sync_stats()["buckets"] == count
    assert model._planning.planner.cap == cap


@run_on_ranks(settings=None)
def test_the_size_of_buckets_knows_of_hosts():
    quarter = sum(p.nbytes for p in Mlp().parameters()) // 4
    assert MIB // 4 < quarter < MIB
    with mock.patch.dict(os.environ, SYNCENGINE_HOST_ID=os.environ["RANK"]):
        syncengine.init()
    assert syncengine.Parallel(Mlp())._planning.planner.cap == quarter


@pytest.mark.parametrize(
    ("mib", "between_hosts", "cap"),
    [(32, True, 1), (3, True, 0.75), (0.5, True, 0.25), (3, False, 1), (0.5, False, 1)],
)
def test_small_models_between_hosts_have_several_buckets(mib: float, between_hosts: bool, cap: float):
    """Or nothing would cross before backward is over."""
    parameters = [torch.empty(int(mib * MIB) // 4)]
    planner = BucketPlanner.create(parameters, [False], False, False, None, None, between_hosts=between_hosts)
    assert planner.cap == cap * MIB


@run_on_ranks(gloo=True)
def test_a_rank_may_keep_models_that_others_have_dropped():
    """Below a group of the backend only the models keep the Python object of the communicator."""
    group, rank, kept = dist.new_group(backend="syncengine"), dist.get_rank(), []
    for _ in range(3):
        model = syncengine.Parallel(nn.Linear(24, 2), process_group=group)
        backwards(model, 6)
        kept += [model] * (rank == 0)
        del model


@pytest.mark.thorough
@pytest.mark.parametrize("rank", mostly_nightly([0, 1], 1))
@run_on_ranks(gloo=True, settings={"timeout": 3.0})
def test_a_forward_of_one_rank_alone_that_plans_is_named(rank: int):
    """The second, where DDP's waits, too."""
    model = syncengine.Parallel(nn.Linear(24, 2))
    backwards(model, 1)
    if syncengine.rank() == rank:
        text = r"in planning the buckets of Parallel\(Linear\) in a forward with gradients enabled"
        with pytest.raises(Timeout, match=text):
            torch.autograd.grad(model(data(7)).sum(), model.module.weight)
    dist.barrier()  # Gloo's


def look(model: nn.Module, freezes: str) -> None:
    """As for a map of saliency, with the parameters of these layers frozen for it."""
    frozen = {"nothing": [], "a part": [model.module[0]], "all": list(model.module)}[freezes]
    for layer in frozen:
        layer.requires_grad_(False)
    inputs = data(7).requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)
    for layer in frozen:
        layer.requires_grad_(True)


def looks_alone(rank: int, at: list[int], freezes: str, options: dict[str, Any]) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for i in range(7):
            if i in at and syncengine.rank() == rank:
                look(model, freezes)
            syncengine.barrier()
            backwards(model, 1)
            found += gradients(model)
        return found

    both(small, step, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("freezes", mostly_nightly(["nothing", "a part", "all"], 0, 1))
@pytest.mark.parametrize("rank", mostly_nightly([0, 1], 1))
def test_a_forward_of_one_rank_alone_is_its_own_where_ddps_is(pool: RankPool, rank: int, freezes: str):
    """In each place but after the first backward, where DDP's plans, and in all of them."""
    for options in ({}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}):
        alone = [i for i in range(7) if i != 1]
        for at in [*([i] for i in alone), alone]:
            pool.run(looks_alone, rank, at, freezes, options, gloo=True, settings={"timeout": 60.0})


@pytest.mark.parametrize("rank", [0, 1])
@run_on_ranks(gloo=True, settings={"timeout": 60.0})
def test_forwards_of_one_rank_alone_while_parameters_are_frozen(rank: int):
    def step(model: nn.Module) -> list[torch.Tensor | None]:
        first, last = model.module[0], model.module[2]
        found = []
        for i in range(10):
            first.requires_grad_(i % 4 != 3)
            if i != 1 and syncengine.rank() == rank:
                torch.autograd.grad(model(data(7)).sum(), list(last.parameters()))
                last.requires_grad_(False)  # for a look at another part alone
                model(data(8).requires_grad_())
                last.requires_grad_(True)
            syncengine.barrier()
            backwards(model, 1)
            found += gradients(model)
            model.zero_grad()
        return [grad for grad in found if grad is not None and grad.any()]

    both(small, step, find_unused_parameters=True)
    both(small, step, find_unused_parameters=True, bucket_cap_mb=0.001)


@run_on_ranks(settings={"timeout": 60.0})
def test_freezing_on_one_rank_alone_when_all_is_planned_is_named():
    model = syncengine.Parallel(small())
    backwards(model, 5)
    if syncengine.rank() == 1:
        model.module[0].bias.requires_grad_(False)
    bucket = r"bucket 0 of Parallel\(Sequential\) \(2.bias, 2.weight, 0.(weight\)|bias, ...\))"
    with pytest.raises(Mismatch, match=f"called {bucket}"):  # by whoever sees it first
        backwards(model, 1)
