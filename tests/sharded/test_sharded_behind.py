"""The communicator fails behind an update that all ranks have made: what is theirs alone is after the same step."""

from __future__ import annotations

import time
from typing import Any

import torch
from pool import run_on_ranks
from sharded_training import batch, error_of, make
from torch import nn

import syncengine


class Counts(torch.optim.SGD):
    """Keeps a number for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


class FailsBehind:
    """A communicator that fails when the ranks tell each other that they have made the update."""

    def __init__(self, sharing: Any) -> None:
        self._sharing, self._communicator = sharing, sharing.host.communicator

    def __getattr__(self, name: str) -> object:
        return getattr(self._communicator, name)

    def all_reduce(self, *args: Any) -> None:
        memory, number = self._sharing.blocks[0].weights.memory, self._sharing._updates + 1
        while min(memory.completed(3)) < number:
            time.sleep(0.001)
        self._communicator.abort("rank 1: enough")
        self._communicator.check_peers()


@run_on_ranks(world=3)
def test_what_is_not_shared_is_after_the_same_step():
    net, alone = make("odd"), nn.Linear(7, 3)
    alone.load_state_dict({"weight": torch.full((3, 7), 0.5), "bias": torch.zeros(3)})
    model = syncengine.Parallel(net)
    parameters = [*net.parameters(), *alone.parameters()]
    optimizer = syncengine.ShardedOptimizer(parameters, Counts, elements=True, lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        alone(model(batch(number))).square().mean().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    before = [parameter.detach().clone() for parameter in parameters]
    if syncengine.rank() == 1:
        optimizer._sharing.host.communicator = FailsBehind(optimizer._sharing)
    step(3)
    still = [i for i, parameter in enumerate(parameters) if torch.equal(parameter, before[i])]
    counts = [optimizer.state[parameter]["count"] for parameter in parameters]
    assert "enough" in error_of(lambda: step(4))
    assert (still, counts) == ([], [4] * 6)
