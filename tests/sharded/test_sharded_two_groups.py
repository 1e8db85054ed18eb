"""Models of several process groups of the same ranks under one optimizer."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, run_on_ranks
from sharded_training import batch, different_weights, error_of, is_common, make, not_divided
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncengine

RATE = 1e-2


def nets() -> list[nn.Module]:
    return [make(), make("odd")]


def wrapped(wrap: Any, modules: list[nn.Module]) -> list[Any]:
    groups = [None, dist.new_group()]
    dist.barrier()  # Gloo fails where a peer has connected and left already
    return [wrap(module, process_group=group) for module, group in zip(modules, groups, strict=True)]


def parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def sharded(modules: list[nn.Module]) -> tuple[list[Any], Any]:
    models = wrapped(syncengine.Parallel, modules)
    return models, syncengine.ShardedOptimizer(parameters(modules), torch.optim.AdamW, lr=RATE)


def plain(modules: list[nn.Module]) -> tuple[list[Any], Any]:
    return wrapped(syncengine.Parallel, modules), torch.optim.AdamW(parameters(modules), lr=RATE)


def torchs(modules: list[nn.Module]) -> tuple[list[Any], Any]:
    models = wrapped(DistributedDataParallel, modules)
    return models, ZeroRedundancyOptimizer(parameters(modules), torch.optim.AdamW, lr=RATE)


def train(models: list[Any], optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for model in models:
            model(batch(step)).square().mean().backward()
        optimizer.step()


def wrong_weights(ours: list[nn.Module], theirs: list[nn.Module]) -> list[str]:
    return [name for one, other in zip(ours, theirs, strict=True) for name in different_weights(one, other)]


def beside(reference: Any) -> list[str]:
    ours, theirs = nets(), nets()
    models, optimizer = sharded(ours)
    assert models[0].communicator is not models[1].communicator
    train(models, optimizer, range(4))
    train(*reference(theirs), range(4))
    return wrong_weights(ours, theirs) + not_divided(nn.ModuleList(ours), optimizer)


def test_they_train_as_under_torch(pool: RankPool):
    assert pool.run(beside, torchs, gloo=True) == [[]] * 2


def test_they_train_as_with_a_plain_optimizer(pool: RankPool):
    assert pool.run(beside, plain, world=3, gloo=True) == [[]] * 3


@pytest.mark.parametrize("which", [0, 1])
@run_on_ranks(gloo=True)
def test_a_rank_without_batches_updates_its_part_of_either(which: int):
    """One of the models alone is trained further, on fewer batches on the first rank."""
    both = nets(), nets()
    for modules, kind in zip(both, (sharded, plain), strict=True):
        models, optimizer = kind(modules)
        train(models, optimizer, range(2))
        with models[which].join():
            train([models[which]], optimizer, range(2, 4 + 2 * syncengine.rank()))
    return wrong_weights(*both)


def fewer_ranks() -> str:
    part = dist.new_group([0, 1])
    ours = nets()
    first = syncengine.Parallel(ours[0])
    optimizer = syncengine.ShardedOptimizer(parameters(ours), torch.optim.AdamW, lr=RATE)
    train([first], optimizer, range(1))
    if syncengine.rank() == 2:
        return ""
    second = syncengine.Parallel(ours[1], process_group=part)
    return error_of(lambda: second(batch(0)))


def test_groups_of_other_ranks_are_refused(pool: RankPool):
    for text in pool.run(fewer_ranks, world=3, gloo=True)[:2]:
        assert "the models of one ShardedOptimizer need process groups of the same ranks" in text


def fails(how: str) -> list[Any]:
    """The second group fails, which the first can't know."""
    modules = nets()
    models, optimizer = sharded(modules)
    train(models, optimizer, range(3))
    dist.barrier()  # nobody is in a step any more
    if syncengine.rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        models[1].communicator.abort("a bad day")
    found = [error_of(lambda: models[1](batch(3)).square().mean().backward())]
    found += [error_of(optimizer.state_dict), len(optimizer.state_dict()["state"])]
    found.append([name for name, p in nn.ModuleList(modules).named_parameters() if is_common(p)])
    found.append(error_of(optimizer.step))
    if how == "fails":
        del models, optimizer
        gc.collect()
        torch.manual_seed(0)
        models, optimizer = sharded(modules)
        train(models, optimizer, range(4, 6))
        found.append(not_divided(nn.ModuleList(modules), optimizer))
    return found


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_what_ends_one_group_ends_the_optimizer(pool: RankPool, how: str):
    text = "a bad day" if how == "fails" else "PeerLost"
    with pool.spawn_ranks(fails, how, world=3, gloo=True) as ranks:
        for rank in ranks:
            if how == "fails" or rank is not ranks[1]:
                error, saving, states, shared, stepping, *after = rank.result()
                assert text in error and text in stepping
                assert (saving, states, shared) == ("", 14, [])
                assert after in ([], [[]])


@run_on_ranks(gloo=True)
def test_a_write_is_named_to_the_ranks_in_the_other_ones_forward():
    """A rank has written to the first model: the others, which are in the second one's forward, hear of it."""
    modules = nets()
    models, optimizer = sharded(modules)
    train(models, optimizer, range(2))
    dist.barrier()  # nobody is in a step any more
    if syncengine.rank() == 1:
        with torch.no_grad():
            modules[0].head.bias.add_(1.0)
    optimizer.zero_grad()
    texts = [error_of(lambda: models[1](batch(2)).square().mean().backward()), error_of(optimizer.step)]
    assert all("parameter head.bias" in text and "rank 1" in text for text in texts), texts
