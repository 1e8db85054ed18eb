"""ShardedOptimizer where a plain optimizer stood: schedulers, scalers, hooks, groups, closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import run_on_ranks
from sharded_training import (
    batch,
    differences,
    different_weights,
    error_of,
    is_common,
    make,
    not_divided,
    plain,
    sharded,
    train,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import syncengine

Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]


def backward(model: nn.Module, step: int, factor: float = 1.0) -> torch.Tensor:
    loss = model(batch(step)).square().mean() * factor
    loss.backward()
    return loss


def schedulers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    kinds = torch.optim.lr_scheduler
    warm = kinds.LinearLR(optimizer, 0.1, total_iters=2)
    sequence = kinds.SequentialLR(optimizer, [warm, kinds.ExponentialLR(optimizer, 0.5)], [2])
    plateau = kinds.ReduceLROnPlateau(optimizer, patience=0)
    cycle = kinds.OneCycleLR(optimizer, 0.02, total_steps=6)
    rates = []
    for step in range(10):
        train(model, optimizer, range(step, step + 1))
        if step < 5:
            sequence.step()
        elif step < 7:
            plateau.step(1.0)
        else:
            cycle.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    assert len(set(rates)) > 5
    return rates, cycle.state_dict()["last_epoch"], plateau.state_dict()


def rate_tensor(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"].fill_(0.01)
    train(model, optimizer, 2)


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What each of them sees, in which order; what they change counts; those that are removed are not called."""
    seen: list[tuple] = []
    weights = list(model.parameters())

    def hook(name: str) -> Callable[..., None]:
        def note(which: torch.optim.Optimizer, *others: Any) -> None:
            sums = [w.detach().double().sum().item() for w in weights]  # of all ranks' slices
            seen.append((name, which is optimizer, sums, [len(other) for other in others]))

        return note

    def halve(which: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in which.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    handles = [
        register_optimizer_step_pre_hook(hook("any, before")),
        register_optimizer_step_post_hook(hook("any, after")),
        optimizer.register_step_pre_hook(halve),
        optimizer.register_step_pre_hook(hook("before")),
        optimizer.register_step_post_hook(hook("after")),
        optimizer.register_state_dict_pre_hook(hook("before state_dict")),
        optimizer.register_state_dict_post_hook(lambda which, state: {**state, "more": 1}),
        optimizer.register_load_state_dict_pre_hook(without_momenta),
        optimizer.register_load_state_dict_post_hook(hook("after load")),
    ]
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(4, 6))
    names = [name for name, *_ in seen]
    step = ["any, before", "before", "after", "any, after"]
    assert sorted(names) == sorted([*step * 4, "before state_dict", "after load"]), names
    assert seen[names.index("before")][2] != seen[names.index("after")][2]
    return seen, optimizer.step.__name__


def without_momenta(which: torch.optim.Optimizer, state: dict) -> dict:
    entries = {
        index: {k: torch.zeros_like(v) if k == "exp_avg" else v for k, v in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


@pytest.mark.parametrize("loop", [schedulers, rate_tensor, hooks])
@run_on_ranks(world=3)
def test_as_with_a_plain_optimizer(loop: Loop):
    nets = [make(), make()]
    (model, optimizer), (reference, plain_optimizer) = sharded(nets[0]), plain(nets[1])
    assert loop(model, optimizer) == loop(reference, plain_optimizer)
    wrong = not_divided(nets[0], optimizer) + different_weights(*nets)
    return wrong + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@run_on_ranks()
def test_groups_names_and_an_optimizer_before_the_model():
    nets = [make(), make()]
    trained = []
    for net, kind in zip(nets, [None, torch.optim.AdamW], strict=True):
        groups = [
            {"params": [(n, p) for n, p in net.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in net.named_parameters() if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
        ]
        if kind is None:
            optimizer = syncengine.ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = kind(groups, lr=1e-2)
        train(syncengine.Parallel(net), optimizer, 4)
        trained.append(optimizer.state_dict())
    return different_weights(*nets) + differences(trained[1], trained[0])


@run_on_ranks()
def test_an_optimizer_that_is_made_after_a_backward():
    """It binds at its first step, then, and has the model's own parameters in its groups."""
    wrong = []
    nets = [make(), make()]
    optimizers: list[torch.optim.Optimizer] = []
    for net, kind in zip(nets, [syncengine.ShardedOptimizer, None], strict=True):
        model = syncengine.Parallel(net)
        backward(model, 0)
        if kind is None:
            optimizers.append(torch.optim.AdamW(net.parameters(), lr=1e-2))
        else:
            optimizers.append(kind(net.parameters(), torch.optim.AdamW, lr=1e-2))
        wrong += ["shared too early"] if any(is_common(p) for p in net.parameters()) else []
        optimizers[-1].step()
        wrong += not_divided(net, optimizers[-1]) if kind is not None else []
        train(model, optimizers[-1], range(1, 3))
    (group,) = optimizers[0].param_groups
    wrong += [] if all(a is b for a, b in zip(group["params"], nets[0].parameters(), strict=True)) else ["param_groups"]
    return wrong + different_weights(*nets) + not_divided(nets[0], optimizers[0])


@run_on_ranks()
def test_two_models():
    nets = [[make(), make("tied")], [make(), make("tied")]]
    for kind, (first, second) in enumerate(nets):
        parameters = [*first.parameters(), *second.parameters()]
        if kind == 0:
            optimizer = syncengine.ShardedOptimizer(parameters, torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        models = [syncengine.Parallel(first), syncengine.Parallel(second)]
        for step in range(4):
            optimizer.zero_grad()
            sum(model(batch(step)).square().mean() for model in models).backward()
            optimizer.step()
    return [name for a, b in zip(*nets, strict=True) for name in different_weights(a, b)]


@run_on_ranks()
def test_a_group_of_a_model_that_was_there_before():
    """Which has been trained without it before."""
    wrong = []
    nets = [[make(), make("tied")], [make(), make("tied")]]
    for (first, second), kind in zip(nets, [sharded, plain], strict=True):
        (one, optimizer), other = kind(first), syncengine.Parallel(second)
        for step in range(6):
            optimizer.zero_grad()
            other.zero_grad()
            backward(one, step)
            backward(other, step)
            if step == 3:
                optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.03})
            optimizer.step()
        if kind is sharded:
            wrong += not_divided(nn.ModuleList([first, second]), optimizer)
    return wrong + [name for a, b in zip(*nets, strict=True) for name in different_weights(a, b)]


@run_on_ranks()
def test_an_optimizer_for_each_of_two_models():
    """Two optimizers, each of one model; the other model's last backward is this rank's own."""
    nets = [[make(), make("tied")], [make(), make("tied")]]
    for kind, (first, second) in zip([sharded, plain], nets, strict=True):
        (one, optimizer), (other, others_optimizer) = kind(first), kind(second)
        for step in range(3):
            optimizer.zero_grad()
            others_optimizer.zero_grad()
            backward(one, step)
            with other.no_sync():
                backward(other, step)
            optimizer.step()
            others_optimizer.zero_grad()
            backward(other, step)
            others_optimizer.step()
    return [name for a, b in zip(*nets, strict=True) for name in different_weights(a, b)]


@run_on_ranks()
def test_the_optimizer_itself_is_not_copied():
    import copy

    model, optimizer = sharded(make())
    train(model, optimizer, 1)
    text = error_of(lambda: copy.deepcopy(optimizer))
    assert "use its state_dict()" in text
