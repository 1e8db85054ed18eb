"""micro_batches(): what forwards write to buffers, the same at any number of ranks, and in a plain loop."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from pool import RankFailure, RankPool
from random_layers import Layer
from test_micro_batches import Answer, joined, plain, train
from test_micro_batches_left import small, train_on
from torch import nn
from torch.nn import Buffer
from torch.nn.utils.parametrizations import spectral_norm

import syncengine

TOTAL, STEPS = 6, 4


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What it computes depends on how often it was called."""
    self.calls += 1
    self.zeros.neg_()  # equal, but not the same bits
    return x * (1 + 0.1 * self.calls) + torch.where(torch.signbit(self.zeros[0]), 0.1, 0.0)


def running(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A mean that is put in the place of the last one."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
    return x - self.mean


def functional(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Written by batch_norm, which leaves versions as they are; a part of a larger tensor."""
    mean, variance = self.both[:, 0].contiguous(), self.both[:, 1].contiguous()
    normalized = nn.functional.batch_norm(x.flatten(0, 1), mean, variance, training=True)
    self.both.data.copy_(torch.stack((mean, variance), 1))
    return normalized.view_as(x) + mean / variance.sqrt()


def written(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The same without a copy."""
    normalized = nn.functional.batch_norm(x.flatten(0, 1), self.mean, self.variance, training=True)
    return normalized.view_as(x) + self.mean / self.variance.sqrt()


def growing(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A cache that appears, and grows with the longest it has seen; values of it never change."""
    x = x[:, : 2 + int(x.sum() * 1e4) % 4]
    if self.cache is None or len(self.cache) < x.shape[1]:
        self.cache = torch.arange(8.0).expand(x.shape[1], 8).cumsum(0).sin()
    return x + self.cache[: x.shape[1]]


def growing_layer() -> nn.Module:
    layer = Layer(growing)
    layer.register_buffer("cache", None, persistent=False)
    return layer


def late(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Registers its buffer when it is first called, and removes it when it is called with it."""
    if hasattr(self, "seen"):
        x = x * (1 + self.seen)
        del self.seen
    else:
        self.register_buffer("seen", x.detach().mean())
    return x


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.norm(x.transpose(1, 2)).transpose(1, 2)
    return y + self.norm.running_mean / self.norm.running_var.sqrt()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "spectral": lambda: spectral_norm(nn.Linear(8, 8)),
    "counting": lambda: Layer(counting, calls=Buffer(torch.tensor(0)), zeros=Buffer(torch.zeros(2), persistent=False)),
    "running": lambda: Layer(running, mean=Buffer(torch.zeros(8))),
    "functional": lambda: Layer(functional, both=Buffer(torch.stack((torch.zeros(8), torch.ones(8)), 1))),
    "written": lambda: Layer(written, mean=Buffer(torch.zeros(8)), variance=Buffer(torch.ones(8))),
    "growing": growing_layer,
    "late": lambda: Layer(late),
    "norm": lambda: Layer(norm, norm=nn.BatchNorm1d(8)),
    "cumulative": lambda: Layer(norm, norm=nn.BatchNorm1d(8, momentum=None)),
}


def loss_of(self: Any, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return self.head(self.middle(self.stem(noise)).tanh()).square().mean()


def net_of(kind: str) -> nn.Module:
    return Layer(loss_of, stem=nn.Linear(8, 8), middle=KINDS[kind](), head=nn.Linear(8, 1))


def leave(model: Any, batches: Any) -> None:
    """Leaves every second step; odd ranks do so a micro-batch later."""
    for at, (_, batch) in enumerate(batches if batches.step % 2 else ()):
        if at == syncengine.rank() % 2:
            break
        model(*batch).backward()


def of_all_kinds(training: Callable[..., Answer], options: dict[str, Any]) -> dict[str, Answer]:
    return {kind: training(partial(net_of, kind), TOTAL, STEPS, **options) for kind in KINDS}


@pytest.mark.parametrize(("world", "leaves"), mostly_nightly([(1, False), *product((2, 3), (False, True))], 0, 4))
def test_buffers_are_those_of_a_plain_loop(pool: RankPool, world: int, leaves: bool):
    (expected,) = pool.run(of_all_kinds, plain, {}, world=1, settings=None)
    answers = pool.run(of_all_kinds, train, {"begin": leave} if leaves else {}, world=world, timeout=200)
    for kind in KINDS:
        assert joined([answer[kind] for answer in answers]) == expected[kind], kind


def large(writes: str) -> float:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if writes == "in place":
            self.table[0, 0] += 1
        elif writes == "another":
            self.table = self.table + 1
        return self.linear(x) * (1 + self.table[0, 0])

    net = Layer(forward, table=Buffer(torch.zeros(4100, 1024)), linear=nn.Linear(4, 1))
    model, _, batches = small(net)
    for _ in range(2):
        train_on(model, batches)
        model.zero_grad()
    return net.table[0, 0].item()


@pytest.mark.parametrize("world", [1, 2])
def test_large_buffers_are_not_written_in_place(pool: RankPool, world: int):
    assert pool.run(large, "nothing", world=world) == [0.0] * world
    assert pool.run(large, "another", world=world) == [2.0] * world
    with pytest.raises(RankFailure, match=r"InvalidUsage: .*buffer table was written in micro-batch"):
        pool.run(large, "in place", world=world)
