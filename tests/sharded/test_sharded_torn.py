"""Torn weights raise wherever they would be used: also by the bare module, its parts, and other optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from pool import RankPool
from sharded_training import batch, error_of, plain, sharded, train
from torch import nn

import syncengine


class Reaches(nn.Module):
    """Its forward reads the parameter of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 97), nn.Linear(97, 7)
        self.whole = nn.Tanh()  # nothing that could be torn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.whole(nn.functional.linear(x, self.first.weight, self.first.bias)))


def through_file(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def uses(net: nn.Module) -> dict[str, Callable[[], object]]:
    def trained_on() -> None:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    return {
        "bare": lambda: net(batch(0)),
        "part": lambda: net.second(torch.ones(1, 97)),
        "outer": lambda: nn.Sequential(net)(batch(0)),
        "functional": lambda: torch.func.functional_call(net, dict(net.named_parameters()), (batch(0),)),
        "optimizer": trained_on,
        "other": lambda: train(*plain(net), 1),
        "copy": lambda: copy.deepcopy(net),
        "file": lambda: through_file(net),
    }


def torn() -> tuple[dict[str, str], dict[str, str], list]:
    net, unrelated = Reaches(), Reaches()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    checkpoint = {name: value.clone() for name, value in net.state_dict().items()}
    unrelated.load_state_dict(checkpoint)
    if syncengine.rank() == 1:
        optimizer._sharing.blocks[0].shard._step = lambda inner: 1 / 0
    error_of(lambda: train(model, optimizer, 1))
    found = {name: error_of(use) for name, use in uses(net).items()}
    others = [error_of(lambda: net.whole(batch(0))), error_of(lambda: train(*sharded(Reaches()), 2))]
    net.load_state_dict(checkpoint)
    wanted = unrelated(batch(0))
    copies = [copy.deepcopy(net), through_file(net)]
    same = [torch.equal(each(batch(0)), wanted) for each in (net, *copies, net)]
    after = {name: error_of(use) for name, use in uses(net).items()}
    hooks = sum(len(module._forward_pre_hooks) for module in (net, net.second))
    return found, after, [*others, same, hooks]


def test_torn_weights_are_used_by_nobody_until_others_are_loaded(pool: RankPool):
    for found, after, (own, unrelated, same, hooks) in pool.run(torn):
        for name, text in found.items():
            assert text.startswith("TornWeights: the weights are torn at step 3"), (name, text)
        assert set(after.values()) == {""}, after
        assert (own, unrelated, same) == ("", "", [True] * 4)
        assert hooks == 0  # those that have looked are gone
