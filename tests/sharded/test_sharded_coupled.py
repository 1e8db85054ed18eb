"""Optimizers whose update of one parameter depends on the others: a rank that has not all of them would err."""

import re
from typing import Any

import pytest
import torch
from pool import run_on_ranks
from sharded_training import copies, error_of, is_unchanged, make, make_odd, sharded, train, trained, unlike_plain
from torch import nn

import syncengine


class Lamb(torch.optim.Optimizer):
    """As timm's and Apex's: a trust ratio for each parameter, and before it, by default, a norm of all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2, max_grad_norm: float | None = 1.0) -> None:
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for group in self.param_groups:
            limit = group["max_grad_norm"]
            clip = (norm / limit).clamp(min=1.0) if limit else 1.0
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad / clip + 0.1 * p
                    p.sub_(update * (p.norm() / update.norm()).clamp(max=10.0), alpha=group["lr"])


class Attribute(torch.optim.SGD):
    """Keeps it where groups do not show it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.clip_global = True


class Distance(torch.optim.SGD):
    """As Prodigy and D-Adaptation: an estimate from all parameters, kept in the groups."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(more, estimate=1.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["estimate"] += sum(p.grad.square().sum().item() for p in group["params"] if p.grad is not None)


@pytest.mark.parametrize("elements", [False, True])
@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (Lamb, {}, "Lamb has max_grad_norm=1.0, a norm over all parameters"),
        (
            Lamb,
            {},
            "pass max_grad_norm=None (some classes: 0), and call torch.nn.utils.clip_grad_norm_() before step()",
        ),
        (Attribute, {}, "Attribute has clip_global=True"),
        (Distance, {"d0": 1e-6}, "Distance has d0=1e-06"),
        (Distance, {"d_coef": 1.0}, "Distance has d_coef=1.0"),
    ],
)
def test_what_couples_parameters_is_refused(kind: type, options: dict[str, Any], text: str, elements: bool):
    with pytest.raises(syncengine.errors.InvalidUsage, match=re.escape(text)):
        syncengine.ShardedOptimizer([nn.Parameter(torch.ones(3))], kind, elements=elements, **options)


@run_on_ranks(world=3)
def test_trust_ratios_are_of_one_parameter():
    return unlike_plain(4, make_odd, Lamb, elements=False, max_grad_norm=None)


@pytest.mark.parametrize("how", ["loaded", "set", "added"])
@run_on_ranks()
def test_it_is_refused_when_it_comes_later(how: str):
    net, model, optimizer = trained(1, make_odd(), Lamb, elements=False, max_grad_norm=None)
    before = copies(net)
    if how == "loaded":
        state = optimizer.state_dict()
        state["param_groups"][0]["max_grad_norm"] = 1.0
        optimizer.load_state_dict(state)
    elif how == "set":
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
    more = {"params": [nn.Parameter(torch.ones(3))], "max_grad_norm": 1.0}
    text = error_of(lambda: optimizer.add_param_group(more) if how == "added" else train(model, optimizer, 1))
    assert "Lamb has max_grad_norm=1.0, a norm over all parameters" in text
    assert is_unchanged(net, before)
    optimizer.param_groups[0]["max_grad_norm"] = None
    train(model, optimizer, 1)


@run_on_ranks()
def test_an_option_that_ranks_have_changed_apart_is_named():
    model, optimizer = sharded(make_odd(), Distance, elements=False)
    text = error_of(lambda: train(model, optimizer, 2))
    assert text.startswith("Mismatch: what ShardedOptimizer.step() is to do differs"), text
    assert "Or, if Distance.step() itself has changed 'estimate': " in text
    assert "it does not treat each parameter by itself, and the weights are void" in text


class Own(torch.optim.SGD):
    pass


@run_on_ranks()
def test_an_option_of_the_users_own_couples_nothing():
    """To clip each group by, say: the class does not read it."""
    net = make()
    first, *rest = net.parameters()
    groups = [{"params": [first], "max_grad_norm": 0.1}, {"params": rest, "max_grad_norm": 1.0}]
    *_, optimizer = trained(2, net, Own, groups, elements=True)
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [0.1, 1.0]
