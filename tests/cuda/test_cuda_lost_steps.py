"""Steps of ``Parallel(model.cuda())`` that are lost since ranks run out of memory: training goes on."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import marked, run_processes
from cuda_training import batch, job
from parallel_models import CAP
from raising_model import InBackward
from torch import nn

import syncengine
from syncengine.errors import Aborted, NotFinite

STEPS = 20
SETTINGS = ["plain", "find_unused", "static_graph", "weight", "nonfinite"]


class Deep(nn.Module):
    """Runs out of memory in front of one of its layers, in forward or in backward: `place` is that layer's number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 300), nn.Linear(300, 300), nn.Linear(300, 2)])
        self.place, self.in_forward = -1, False

    def use_too_much(self, layer: int, in_forward: bool) -> None:
        if (layer, in_forward) == (self.place, self.in_forward):
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for i, layer in enumerate(self.layers):
            self.use_too_much(i, in_forward=True)
            x = layer(InBackward.apply(x, partial(self.use_too_much, i, in_forward=False)))
        return x


def error_of(act: Callable[[], None]) -> tuple[str, str]:
    try:
        act()
    except (torch.OutOfMemoryError, Aborted, NotFinite) as error:
        return type(error).__name__, str(error)
    return "", ""


def mean_gradients(module: nn.Module, step: int, weights: list[int]) -> list[torch.Tensor]:
    """Of all ranks' batches, by torch alone."""
    losses = [module(batch(step, rank)).square().mean() * n for rank, n in enumerate(weights)]
    return torch.autograd.grad(sum(losses) / sum(weights), [*module.parameters()])


def loses_steps(rank: int, setting: str) -> int:
    """How many steps were lost, while the averages of all others are as they should be."""
    world, lost = dist.get_world_size(), 0
    torch.manual_seed(0)
    module = Deep().cuda()
    options: dict[str, Any] = {"find_unused_parameters": setting == "find_unused", **CAP}
    model = syncengine.Parallel(copy.deepcopy(module), nonfinite="raise" if setting == "nonfinite" else None, **options)
    if setting == "static_graph":
        model._set_static_graph()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, module)]
    draw = random.Random(setting)  # the same on all ranks
    for step in range(STEPS):
        ranks = draw.sample(range(world), draw.choice([0, 0, 1, world]))
        raising = {i: (draw.randrange(4), draw.random() < 0.3) for i in ranks}
        model.module.place, model.module.in_forward = raising.get(rank, (-1, False))
        weights = [1 + (i + step) % 3 if setting == "weight" else 1 for i in range(world)]
        brings_nan = setting == "nonfinite" and step % 3 == 0
        x = batch(step) * torch.nan if brings_nan and rank == 0 else batch(step)
        model.zero_grad()
        if setting == "weight":
            model.weight(weights[rank])
        name, said = error_of(lambda x=x: model(x).square().mean().backward())
        if rank in raising:
            assert name == "OutOfMemoryError"
        elif raising:
            forward, backward = "raised in forward: OutOfMemoryError: CUDA out of memory", "backward aborted"
            texts = [f"rank {i} {forward}" if by[1] else f"rank {i}: {backward}" for i, by in raising.items()]
            assert name == "Aborted" and any(text in said for text in texts), said
            assert all(p.grad is None for p in model.parameters())
        elif brings_nan:
            assert name == "NotFinite" and said.startswith("rank 0 brought NaN into layers."), said
        else:
            assert not name, said
            means = mean_gradients(module, step, weights)
            for p, q, mean in zip(module.parameters(), model.parameters(), means, strict=True):
                torch.testing.assert_close(q.grad, mean)
                p.grad = q.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        lost += bool(raising)
        assert syncengine.default_communicator().exception() is None
    assert all(map(torch.equal, model.parameters(), module.parameters()))
    return lost


def loses_steps_of_settings(rank: int, settings: list[str]) -> list[int]:
    with job():
        return [loses_steps(rank, setting) for setting in settings]


@marked
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_out_of_memory_cost_a_step(world: int):
    lost, *others = run_processes(world, partial(loses_steps_of_settings, settings=SETTINGS))
    assert others == [lost] * (world - 1)
    assert all(5 < n < STEPS - 2 for n in lost), lost
