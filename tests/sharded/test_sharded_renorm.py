"""Embeddings with max_norm, which write to their weights in forward: not where these are shared."""

from __future__ import annotations

import copy

import pytest
import torch
from pool import RankPool
from sharded_training import different_weights, error_of, is_common, make
from torch import nn

import syncengine

IDS = torch.tensor([[1, 2]])


def embedding(kind: type = nn.Embedding, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(5, 24, max_norm=1.0, **options), nn.Flatten(), nn.LazyLinear(2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IDS).square().mean().backward()
    optimizer.step()


def refused(kind: type) -> list[str]:
    """In each forward, for those who catch errors and go on with the next batch."""
    net = embedding(kind)
    net(IDS)
    model = syncengine.Parallel(net)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    texts = [error_of(lambda: model(IDS)) for _ in range(3)]
    shared = "shared" if any(map(is_common, net.parameters())) else "private"
    net[0].max_norm = None
    return [*texts, shared, error_of(lambda: step(model, optimizer)), str(all(map(is_common, net.parameters())))]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_is_refused(pool: RankPool, kind: type):
    for *texts, shared, after, now in pool.run(refused, kind):
        for text in texts:
            assert f"0.weight belongs to an {kind.__name__} with max_norm" in text
        assert (shared, after, now) == ("private", "", "True")


def unfrozen() -> list[str]:
    net = embedding()
    net(IDS)
    net[0].requires_grad_(False)
    model = syncengine.Parallel(net)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    texts = [error_of(lambda: step(model, optimizer)) for _ in range(2)]
    net[0].requires_grad_(True)
    return [*texts, *(error_of(lambda: step(model, optimizer)) for _ in range(2)), str(is_common(net[0].weight))]


def test_one_is_refused_when_it_is_unfrozen(pool: RankPool):
    for *frozen, first, second, shared in pool.run(unfrozen):
        assert frozen == ["", ""]
        assert "0.weight belongs to an Embedding with max_norm" in first
        assert "0.weight belongs to an Embedding with max_norm" in second
        assert shared == "False"


def not_ours(how: str) -> list[str]:
    """Frozen, or updated by a plain optimizer on each rank."""
    ours = embedding()
    ours(IDS)
    theirs, kept = copy.deepcopy(ours), []
    for net, kind in ((ours, syncengine.ShardedOptimizer), (theirs, None)):
        net[0].requires_grad_(how != "frozen")
        model = syncengine.Parallel(net)
        parameters = list(net.parameters() if how == "frozen" else net[2].parameters())
        others = [torch.optim.SGD(net[0].parameters(), lr=1.0)] if how != "frozen" else []
        optimizer = kind(parameters, torch.optim.SGD, lr=0.1) if kind else torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            for other in others:
                other.zero_grad()
            step(model, optimizer)
            for other in others:
                other.step()
        kept.append((model, optimizer))
    shared = [name for name, p in ours.named_parameters() if is_common(p)]
    return [*different_weights(ours, theirs), *shared]


@pytest.mark.parametrize("how", ["frozen", "of another optimizer"])
def test_one_that_stays_private_renorms_as_ever(pool: RankPool, how: str):
    assert pool.run(not_ours, how) == [["2.weight", "2.bias"]] * 2


def caught_once() -> list[str]:
    """Another reason not to share: it is asked again in the next forward, and numbers of models stay in order."""
    net = make()
    model = syncengine.Parallel(net)
    optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    held = net.head.weight.detach()
    texts = [error_of(lambda: model(torch.zeros(2, 24))) for _ in range(2)]
    del held
    then = error_of(lambda: model(torch.zeros(2, 24)))
    return [*texts, then, str(is_common(net.head.weight)), str(len(optimizer.state))]


def test_a_refusal_that_was_caught_is_repeated(pool: RankPool):
    for first, second, then, shared, _ in pool.run(caught_once):
        for text in (first, second):
            assert "the memory of parameter head.weight is also held by 1 other" in text
        assert (then, shared) == ("", "True")
