"""What holds the memory of a parameter before it is shared: attributes of the model's modules."""

import copy

import pytest
import torch
from pool import run_on_ranks
from sharded_training import batch, error_of, is_common, sharded, train, unlike_plain
from torch import nn

import syncengine


def of_kind(kind: str, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    layer, last = nn.Linear(24, 97), nn.Linear(97, 7)
    if kind == "weight_norm":
        layer = nn.utils.weight_norm(layer)
    else:
        nn.utils.parametrizations.spectral_norm(layer)
        nn.utils.parametrizations.weight_norm(last)
    return nn.Sequential(layer.requires_grad_(not frozen), nn.Tanh(), last)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["weight_norm", "parametrizations"])
@run_on_ranks()
def test_torchs_norms_of_weights_follow(kind: str, frozen: bool):
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if frozen:
            train(model, optimizer, 2)
            model.module[0].requires_grad_(True)
        train(model, optimizer, range(2, 5))

    return unlike_plain(steps, lambda: of_kind(kind, frozen))


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
    """And no other attribute: only what holds this parameter's memory."""
    torch.manual_seed(0)
    net = Keeps()
    net.other, net.number = torch.ones(3), 3
    net.more = copy.deepcopy(net.inner.alias)
    model, optimizer = sharded(net)
    text = error_of(lambda: model(batch(0)))
    assert "the memory of parameter inner.weight is also held by 1 other tensor(s), which" in text
    assert "the attribute inner.alias" in text and "more" not in text
    del net.inner.alias
    train(model, optimizer, 1)
    assert is_common(net.inner.weight)


@run_on_ranks()
def test_what_is_not_there_yet_is_left_alone():
    return error_of(lambda: syncengine.ShardedOptimizer(nn.LazyLinear(3).parameters(), torch.optim.SGD, lr=0.1))
