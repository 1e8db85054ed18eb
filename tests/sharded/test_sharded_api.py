"""ShardedOptimizer where a plain optimizer stood: schedulers, scalers, hooks, groups, closures."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from pool import run_on_ranks
from sharded_training import (
    backward,
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
    trained,
    unlike_plain,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import syncengine

Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]
KINDS = (partial(syncengine.ShardedOptimizer, optimizer_class=torch.optim.AdamW), torch.optim.AdamW)


def two_models() -> list[nn.Module]:
    return [make(), make("tied")]


def different(nets: list[list[nn.Module]]) -> list[str]:
    return [name for a, b in zip(*nets, strict=True) for name in different_weights(a, b)]


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


@pytest.mark.thorough
@pytest.mark.parametrize("loop", mostly_nightly([schedulers, rate_tensor, hooks], 0, 2))
@run_on_ranks(world=3)
def test_as_with_a_plain_optimizer(loop: Loop):
    return unlike_plain(loop)


@run_on_ranks()
def test_groups_names_and_an_optimizer_before_the_model():
    nets = [make(), make()]
    trained = []
    for net, kind in zip(nets, KINDS, strict=True):
        groups = [
            {"params": [(n, p) for n, p in net.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in net.named_parameters() if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
        ]
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
    for net, kind in zip(nets, KINDS, strict=True):
        model = syncengine.Parallel(net)
        backward(model, 0)
        optimizers.append(kind(net.parameters(), lr=1e-2))
        wrong += ["shared too early"] if any(map(is_common, net.parameters())) else []
        optimizers[-1].step()
        wrong += not_divided(net, optimizers[0]) if net is nets[0] else []
        train(model, optimizers[-1], range(1, 3))
    (group,) = optimizers[0].param_groups
    wrong += [] if all(a is b for a, b in zip(group["params"], nets[0].parameters(), strict=True)) else ["param_groups"]
    return wrong + different_weights(*nets) + not_divided(nets[0], optimizers[0])


@run_on_ranks()
def test_two_models():
    nets = [two_models(), two_models()]
    for kind, (first, second) in zip(KINDS, nets, strict=True):
        optimizer = kind([*first.parameters(), *second.parameters()], lr=1e-2)
        models = [syncengine.Parallel(first), syncengine.Parallel(second)]
        for step in range(4):
            optimizer.zero_grad()
            sum(model(batch(step)).square().mean() for model in models).backward()
            optimizer.step()
    return different(nets)


@run_on_ranks()
def test_a_group_of_a_model_that_was_there_before():
    """Which has been trained without it before."""
    wrong = []
    nets = [two_models(), two_models()]
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
    return wrong + different(nets)


@run_on_ranks()
def test_an_optimizer_for_each_of_two_models():
    """Two optimizers, each of one model; the other model's last backward is this rank's own."""
    nets = [two_models(), two_models()]
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
    return different(nets)


@run_on_ranks()
def test_the_optimizer_itself_is_not_copied():
    *_, optimizer = trained(1)
    assert "use its state_dict()" in error_of(lambda: copy.deepcopy(optimizer))
