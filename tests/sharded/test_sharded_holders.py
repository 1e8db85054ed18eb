"""What holds the memory of a parameter before it is shared: attributes of the model's modules."""

from __future__ import annotations

import copy

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import batch, different_weights, error_of, is_common, not_divided, plain, sharded, train
from torch import nn

import syncengine


def of_kind(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer, last = nn.Linear(24, 97), nn.Linear(97, 7)
    if kind == "spectral_norm":
        layer = nn.utils.spectral_norm(layer)
    elif kind == "weight_norm":
        layer = nn.utils.weight_norm(layer)
    else:
        nn.utils.parametrizations.spectral_norm(layer)
        nn.utils.parametrizations.weight_norm(last)
    return nn.Sequential(layer, nn.Tanh(), last)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def normed(kind: str, frozen: bool) -> list[str]:
    ours, theirs = of_kind(kind), of_kind(kind)
    wrong = []
    for net, make_one in ((ours, sharded), (theirs, plain)):
        net[0].requires_grad_(not frozen)
        model, optimizer = make_one(net)
        if frozen:
            train(model, optimizer, 2)
            net[0].requires_grad_(True)
        train(model, optimizer, range(2, 5))
        wrong += not_divided(net, optimizer) if make_one is sharded else []
    return wrong + different_weights(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "parametrizations"])
def test_torchs_norms_of_weights_follow(pool: RankPool, kind: str, frozen: bool):
    assert pool.run(normed, kind, frozen) == [[]] * 2


class Keeps(nn.Module):
    """An alias of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 7)
        self.inner.alias = self.inner.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@run_on_ranks()
def test_an_attribute_is_named():
    torch.manual_seed(0)
    net = Keeps()
    model, optimizer = sharded(net)
    text = error_of(lambda: model(batch(0)))
    del net.inner.alias
    after = error_of(lambda: train(model, optimizer, 1))
    shared = str(is_common(net.inner.weight))
    assert "the memory of parameter inner.weight is also held by 1 other" in text
    assert "the attribute inner.alias" in text
    assert (after, shared) == ("", "True")


@run_on_ranks()
def test_no_other_attribute_is_named():
    """Only what holds this parameter's memory is named."""
    net = Keeps()
    net.other, net.number = torch.ones(3), 3
    net.more = copy.deepcopy(net.inner.alias)
    model, _optimizer = sharded(net)
    text = error_of(lambda: model(batch(0)))
    assert "inner.alias" in text and "more" not in text and "other tensor(s), which" in text


@run_on_ranks()
def test_what_is_not_there_yet_is_left_alone():
    """Whose parameters have no memory yet."""
    return error_of(lambda: syncengine.ShardedOptimizer(nn.LazyLinear(3).parameters(), torch.optim.SGD, lr=0.1))
