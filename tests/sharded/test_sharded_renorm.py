"""Embeddings with max_norm, which write to their weights in forward: not where these are shared."""

import copy

import pytest
import torch
from pool import run_on_ranks
from sharded_training import different_weights, error_of, is_common, sharded
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


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@run_on_ranks()
def test_an_embedding_with_max_norm_is_refused(kind: type):
    """In each forward, for those who catch errors and go on with the next batch."""
    net = embedding(kind)
    net(IDS)
    model, optimizer = sharded(net, torch.optim.SGD)
    texts = [error_of(lambda: model(IDS)) for _ in range(3)]
    assert not any(map(is_common, net.parameters()))
    net[0].max_norm = None
    for text in texts:
        assert f"0.weight belongs to an {kind.__name__} with max_norm" in text
    step(model, optimizer)
    assert all(map(is_common, net.parameters()))


@run_on_ranks()
def test_one_is_refused_when_it_is_unfrozen():
    net = embedding()
    net(IDS)
    net[0].requires_grad_(False)
    model, optimizer = sharded(net, torch.optim.SGD)
    for _ in range(2):
        step(model, optimizer)
    net[0].requires_grad_(True)
    for _ in range(2):
        assert "0.weight belongs to an Embedding with max_norm" in error_of(lambda: step(model, optimizer))
    assert not is_common(net[0].weight)


@pytest.mark.parametrize("how", ["frozen", "of another optimizer"])
@run_on_ranks()
def test_one_that_stays_private_renorms_as_ever(how: str):
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
    assert [name for name, p in ours.named_parameters() if is_common(p)] == ["2.weight", "2.bias"]
    return different_weights(ours, theirs)
