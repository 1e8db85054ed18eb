"""How classes of optimizers are made again, for this rank's part."""

from typing import Any

import pytest
import torch
from pool import run_on_ranks
from sharded_training import copies, different_weights, error_of, is_unchanged, make, not_divided, train
from torch import nn

import syncengine


class Mixed(torch.optim.Optimizer):
    """Looks at the options that it is given, as Muon's with AdamW for the rest does; knows others by itself."""

    def __init__(self, groups: Any, lr: float = 0.02) -> None:
        groups = list(groups)
        for group in groups:
            assert set(group) == {"params", "uses_signs"}, set(group)
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = parameter.grad.sign() if group["uses_signs"] else parameter.grad
                    parameter.sub_(update, alpha=group["lr"])


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in net.parameters() if p.dim() == d], "uses_signs": d == 2} for d in (2, 1)]


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_it_gets_the_options_that_it_was_given(freezes: bool, world: int):
    def steps(net: nn.Module, model: nn.Module, optimizer: Any) -> None:
        net.layers[0].requires_grad_(not freezes)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        for step in range(4):
            if step == 2:
                net.layers[0].requires_grad_(True)
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "uses_signs": True, "mine": 1})
            train(model, optimizer, range(step, step + 1))
            if step < 2:  # of the groups that there were
                scheduler.step()

    nets = [make(), make()]
    optimizer = syncengine.ShardedOptimizer(groups_of(nets[0]), Mixed, elements=False)
    for net, one in zip(nets, (optimizer, Mixed(groups_of(nets[1]))), strict=True):
        steps(net, syncengine.Parallel(net), one)
    return different_weights(*nets) + (not_divided(nets[0], optimizer) if world > 1 else [])


class Looking(torch.optim.SGD):
    """At the first parameter, which a rank may not have."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, lr)
        self.dtype = self.param_groups[0]["params"][0].dtype


@run_on_ranks()
def test_an_error_of_one_rank_is_everybodys():
    net = make()
    model = syncengine.Parallel(net)
    weights = [max(net.parameters(), key=torch.Tensor.numel)]  # rank 0's
    others = [p for p in net.parameters() if p is not weights[0]]
    optimizer = syncengine.ShardedOptimizer([{"params": weights}, {"params": others}], Looking, elements=False, lr=0.1)
    before = copies(net)
    for _ in range(2):
        text = error_of(lambda: train(model, optimizer, 1))
        assert "rank 1: Looking, made again for this rank's part of the parameters" in text
        assert "raised IndexError: list index out of range" in text
    assert is_unchanged(net, before)
    optimizer.release()
    train(model, torch.optim.SGD(net.parameters(), lr=0.1), 1)
