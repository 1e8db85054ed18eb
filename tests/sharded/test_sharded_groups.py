"""`param_groups`: options that optimizers write to, options that are numpy's, and edits by hand."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pool import run_on_ranks
from sharded_training import (
    backward,
    copies,
    different_weights,
    error_of,
    is_unchanged,
    make,
    plain,
    sharded,
    train,
    trained,
    unlike_plain,
)
from torch import nn

import syncengine
from syncengine.sharded.shard import describe_options


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some do, and corrects its rate by that."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["step"])


@run_on_ranks()
def test_what_is_counted_in_groups_is_counted_once():
    def frozen() -> nn.Module:
        net = make()
        net.layers[0].requires_grad_(False)
        return net

    def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 2)
        model.module.layers[0].requires_grad_(True)  # a block of its own
        train(model, optimizer, range(2, 4))
        assert optimizer.param_groups[0]["step"] == 4

    return unlike_plain(counted, frozen, Counting, elements=True)


class Odd:
    """An option that is an object."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Odd({self.text})"


OPTIONS = {
    "numpy's number": lambda rank: np.float32(0.1 + rank),
    "numpy's array": lambda rank: np.array([0.1 + rank]),
    "a dict": lambda rank: {"a": 0.1 + rank},
    "an object": lambda rank: Odd(str(rank)),
    "a set": lambda rank: {f"{rank} {number}" for number in range(20)},
}


@pytest.mark.parametrize("kind", OPTIONS)
@run_on_ranks()
def test_options_of_any_kind_are_compared(kind: str):
    _, model, optimizer = trained(1)
    key = "lr" if kind == "numpy's number" else "mine"
    optimizer.param_groups[0][key] = OPTIONS[kind](0)
    train(model, optimizer, 1)
    optimizer.param_groups[0][key] = OPTIONS[kind](syncengine.rank())
    other = error_of(lambda: train(model, optimizer, 1))
    assert "Mismatch" in other and "group 0 of 10 parameters" in other, other


@pytest.mark.parametrize("value", [np.float32, np.float64, float])
@run_on_ranks()
def test_a_joined_rank_gets_them(value: Callable[[float], Any]):
    nets = [make(), make()]
    for net, kind in zip(nets, [sharded, plain], strict=True):
        model, optimizer = kind(net, torch.optim.SGD)
        with model.join():
            for step in range(1 + 3 * syncengine.rank()):
                optimizer.param_groups[0]["lr"] = value(0.1 / (1 + step))
                train(model, optimizer, range(step, step + 1))
    return different_weights(*nets)


@run_on_ranks(world=1)
def test_a_private_parameter_may_be_replaced_by_hand():
    """Of private parameters: their optimizer goes on with what is there now."""
    ours, theirs = make(), make()
    for net, make_one in ((ours, sharded), (theirs, plain)):
        model, optimizer = make_one(net)
        train(model, optimizer, 2)
        params = optimizer.param_groups[0]["params"]
        assert params[8] is net.head.weight and optimizer.state[params[8]]
        torch.manual_seed(1)
        net.head.weight = params[8] = nn.Parameter(torch.randn_like(net.head.weight))
        train(net, optimizer, 2)
    return different_weights(ours, theirs)


@pytest.mark.parametrize("how", ["a parameter", "replaced", "a group", "the order"])
@run_on_ranks()
def test_groups_of_shared_parameters_are_not_to_be_edited(how: str):
    net = make()
    groups = [{"params": list(net.layers.parameters()), "lr": 0.1}, {"params": list(net.head.parameters())}]
    _, model, optimizer = trained(2, net, torch.optim.AdamW, groups)
    kept = [(group, list(group["params"])) for group in optimizer.param_groups]
    if how == "a parameter":
        del optimizer.param_groups[1]["params"][0]
    elif how == "replaced":
        optimizer.param_groups[1]["params"][0] = torch.nn.Parameter(torch.ones(2))
    elif how == "a group":
        del optimizer.param_groups[0]
    else:
        optimizer.param_groups.reverse()
    weights = copies(net)
    name = "layers.0.weight" if how in ("a group", "the order") else "head.weight"
    assert f"parameter {name} is not in the group any more" in error_of(lambda: train(model, optimizer, 1))
    assert is_unchanged(net, weights)
    optimizer.param_groups[:] = [group for group, _ in kept]
    for group, params in kept:
        group["params"][:] = params
    train(model, optimizer, 1)


def test_sets_are_described_alike_in_all_processes():
    """In each of which they may have another order, as these two have."""
    one, other = {0, 1 << 20}, {1 << 20, 0}
    assert list(one) != list(other)
    texts = {describe_options([{"params": [], "mine": {"some": [s]}}])[0] for s in (one, other)}
    assert len(texts) == 1, texts
    assert "1048576" in texts.pop()


@run_on_ranks()
def test_names_of_parameters_that_are_gone_are_forgotten():
    """Whose ids others may get, which would be taken for them and shared."""
    gone, net = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 2)), make()
    gone[0].requires_grad_(False)
    models = [syncengine.Parallel(one) for one in (gone, net)]
    parameters = [gone[0].weight, *net.parameters()]
    optimizer = syncengine.ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    for model in models:
        backward(model, 0)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = parameters[0] = nn.Parameter(torch.ones(3))
    optimizer.step()
    del gone, model, models[0]
    gc.collect()
    names = set(optimizer._sharing.registry.names.values())
    return sorted(names - {name for name, _ in net.named_parameters()})
