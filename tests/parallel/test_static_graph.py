"""static_graph=True: unused parameters and hooks that fire several times, learned in the first iteration."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, Run, bits_between_ours_and_ddp, both, data, gradients
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncengine
from syncengine.errors import InvalidUsage, SyncError


class Repeated(nn.Module):
    """One layer in three checkpoints, another in two, one in none, one unused."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second, self.third, self.never = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.first, self.second, self.first, self.second, self.first):
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return self.third(x)


def steps(model: nn.Module, count: int = 4) -> None:
    for i in range(count):
        model.zero_grad()
        model(data(i)).square().mean().backward()


@pytest.mark.parametrize("mode", ["rank_order", "ring"])
def test_checkpoints_used_several_times(pool: RankPool, mode: str):
    pool.run(checkpoints_like_ddp, gloo=True, settings={"timeout": 60.0, "numerics": mode})


def checkpoints_like_ddp() -> None:
    for reentrant in (True, False):
        for options in ({}, CAP):
            both(partial(Repeated, reentrant), steps, static_graph=True, **options)


def test_static_graphs_train_to_the_bits_of_ddp_on_3_ranks_in_ring(pool: RankPool):
    runs = [Run(steps=5, options=(("static_graph", True), *more)) for more in ((), (("find_unused_parameters", True),))]
    runs.append(Run(model="mixed", dtype=None, steps=5, options=(("static_graph", True), ("bucket_cap_mb", 0.01))))
    settings = {"timeout": 60.0, "numerics": "ring"}
    for answer in pool.run(bits_between_ours_and_ddp, runs, world=3, gloo=True, settings=settings):
        assert not any(answer.values())


@run_on_ranks(gloo=True)
def test_unused_parameters_are_those_of_the_first_iteration():
    def fixed(model: nn.Module, mine: bool) -> None:
        for i in range(4):
            model.zero_grad()
            model(data(i), mine).square().mean().backward()

    both(Branches, partial(fixed, mine=True), static_graph=True)
    both(Branches, partial(fixed, mine=syncengine.rank() == 0), static_graph=True, **CAP)
    both(Branches, partial(fixed, mine=syncengine.rank() == 0), static_graph=True, find_unused_parameters=True)


@run_on_ranks(gloo=True)
def test_static_graph_can_be_set_later():
    def step(model: nn.Module) -> None:
        model._set_static_graph()
        assert model.static_graph
        steps(model)

    both(Repeated, step)
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        model = wrap(nn.Linear(24, 24))
        steps(model, 1)
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._set_static_graph()
        again = wrap(nn.Linear(24, 24), static_graph=True)
        with pytest.warns(UserWarning, match="no need to set it again"):
            again._set_static_graph()


@run_on_ranks()
def test_with_no_sync():
    """DDP fails in an assertion of its own."""
    for make in (Mlp, Repeated):
        results = []
        for static_graph in (True, False):
            torch.manual_seed(0)
            model = syncengine.Parallel(make(), static_graph=static_graph, find_unused_parameters=not static_graph)
            if make is Repeated and not static_graph:
                model.module.reentrant = False
            for i in range(3):
                model.zero_grad()
                with model.no_sync():
                    model(data(10 + i)).square().mean().backward()
                model(data(i)).square().mean().backward()
            results.append(gradients(model))
        for ours, expected in zip(*results, strict=True):
            assert (ours is None) == (expected is None)
            if ours is not None:
                torch.testing.assert_close(ours, expected)


@run_on_ranks()
def test_the_first_iteration_has_the_averages_too():
    torch.manual_seed(0)
    module = Repeated()
    expected = torch.zeros(24, 24)
    for rank in range(2):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
        module(x).square().mean().backward()
        expected += module.first.weight.grad / 2
        module.zero_grad()
    model = syncengine.Parallel(module, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        model(data()).square().mean().backward()
        torch.testing.assert_close(module.first.weight.grad, expected)
        assert module.never.weight.grad is None


@run_on_ranks()
def test_buckets_are_rebuilt_in_ready_order():
    model = syncengine.Parallel(Mlp(), static_graph=True, **CAP)
    steps(model, 2)
    assert not model._has_rebuilt_buckets  # the order in which the first iteration reduces says nothing
    steps(model, 1)
    assert model._has_rebuilt_buckets


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


def changed(more: bool) -> str:
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
    return str(error.value)


@pytest.mark.parametrize("more", [True, False])
def test_a_graph_that_changes_is_an_error(pool: RankPool, more: bool):
    for text in pool.run(changed, more, timeout=20.0):
        assert "training graph has changed in this iteration" in text
        assert ("right.weight" if more else "left.weight") in text or "right.bias" in text
