"""Where autograd's gradients lie changes how bytes move, never the bits."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from parallel_models import Mlp, Run, train
from pool import RankPool
from torch import nn

import syncengine
from examples.gpt.model import GPT, GPTConfig



def settings(way: str, **more: object) -> dict[str, object]:
    return {"timeout": 60.0, "gradient_memory": way, **more}


def train_gpt(steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = syncengine.Parallel(GPT(GPTConfig(vocabulary=128, layers=2, heads=2, width=64)))
    generator = torch.Generator().manual_seed(syncengine.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(steps):
        tokens = torch.randint(128, (2, 33), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        history += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return history


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def train_conv(steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(4)
    model = syncengine.Parallel(Convolutions())
    generator = torch.Generator().manual_seed(syncengine.rank())
    history = []
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(2 + step, 3, 16, 16, generator=generator)).square().sum().backward()
        history += [p.grad.clone() for p in model.parameters()]
    return history


def train_all() -> tuple[list[list[bytes]], dict[str, int]]:
    runs = [Run("mlp"), Run("mlp", accumulate=2), Run("mlp", set_to_none=False), Run("tied"), Run("conv")]
    runs += [Run("mixed", dtype=None), Run("mlp", dtype=torch.bfloat16), Run("mlp", options=(("bucket_cap_mb", 0.1),))]
    results = [train(syncengine.Parallel, run) for run in runs] + [train_gpt(), train_conv()]
    bits = [[t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in result] for result in results]
    return bits, syncengine.default_communicator().counters()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_are_those_of_the_staged_way(pool: RankPool, world: int):
    expected = pool.run(train_all, world=world, settings=settings("torch"))
    of_state = expected[0][1]["direct_bytes"]  # copied from rank 0 at construction
    found = pool.run(train_all, world=world, settings=settings("arena"))
    assert [bits for bits, _ in found] == [bits for bits, _ in expected]
    for _, counters in found:
        assert counters["direct_bytes"] - of_state > counters["staged_bytes"], counters


def check_counters() -> dict[str, int]:
    """Of one step with all gradients made anew."""
    model = syncengine.Parallel(Mlp())
    communicator = syncengine.default_communicator()
    for _ in range(2):
        model(torch.randn(3, 24)).sum().backward()
        model.zero_grad()
    before = communicator.counters()
    model(torch.randn(3, 24)).sum().backward()
    after = communicator.counters()
    moved = {name: after[name] - before[name] for name in ("direct_bytes", "staged_bytes", "one_shot_bytes")}
    return {**moved, **model.sync_stats()["copied_bytes"], "all": model.sync_stats()["reduced_bytes"]}


def test_no_large_gradient_is_copied_or_staged(pool: RankPool):
    small = sum(4 * p.numel() for p in Mlp().parameters() if 4 * p.numel() < 4096)
    for moved in pool.run(check_counters):
        assert moved["staged_bytes"] + moved["one_shot_bytes"] + moved["small"] <= small
        assert moved["direct_bytes"] >= moved["all"] - small


def outlive_everything() -> None:
    """Gradients, and children forked meanwhile, outlive the communicator."""
    model = syncengine.Parallel(Mlp())
    model(torch.randn(3, 24)).sum().backward()
    kept = [(p.grad, p.grad.clone()) for p in model.parameters()]
    pid = os.fork()
    if pid == 0:
        same = all(torch.equal(grad, copy) for grad, copy in kept)
        kept[0][0].zero_()
        del kept, model
        gc.collect()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    model.zero_grad()
    del model
    syncengine.shutdown()
    gc.collect()
    assert all(torch.equal(grad, copy) for grad, copy in kept)
    for grad, _ in kept:
        grad.add_(1)
    del kept, grad
    gc.collect()
    assert torch.ones(10000).sum() == 10000


@pytest.mark.parametrize("way", ["arena", "torch"])
def test_gradients_outlive_the_communicator(pool: RankPool, way: str):
    pool.run(outlive_everything, settings=settings(way))
