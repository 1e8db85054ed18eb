"""micro_batches(): what forwards write to buffers, the same at any number of ranks, and in a plain loop."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable

import pytest
import torch
from marks import mostly_nightly
from pool import RankFailure, RankPool
from test_micro_batches import Augmented, loader
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import syncengine

TOTAL, STEPS = 6, 4


class Counting(nn.Module):
    """What it computes depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("zeros", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.zeros.neg_()  # equal, but not the same bits
        return x * (1 + 0.1 * self.calls) + torch.where(torch.signbit(self.zeros[0]), 0.1, 0.0)


class Running(nn.Module):
    """A mean that is put in the place of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Functional(nn.Module):
    """Written by batch_norm, which leaves versions as they are; a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("both", torch.zeros(8, 2))
        with torch.no_grad():
            self.both[:, 1] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.both[:, 0].contiguous(), self.both[:, 1].contiguous()
        normalized = nn.functional.batch_norm(x.flatten(0, 1), mean, variance, training=True)
        self.both.data.copy_(torch.stack((mean, variance), 1))
        return normalized.view_as(x) + mean / variance.sqrt()


class Written(nn.Module):
    """The same without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = nn.functional.batch_norm(x.flatten(0, 1), self.mean, self.variance, training=True)
        return normalized.view_as(x) + self.mean / self.variance.sqrt()


class Growing(nn.Module):
    """A cache that appears, and grows with the longest it has seen; values of it never change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, : 2 + int(x.sum() * 1e4) % 4]
        if self.cache is None or len(self.cache) < x.shape[1]:
            self.cache = torch.arange(8.0).expand(x.shape[1], 8).cumsum(0).sin()
        return x + self.cache[: x.shape[1]]


class Late(nn.Module):
    """Registers its buffer when it is first called, and removes it when it is called with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "seen"):
            x = x * (1 + self.seen)
            del self.seen
        else:
            self.register_buffer("seen", x.detach().mean())
        return x


class Norm(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y + self.norm.running_mean / self.norm.running_var.sqrt()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "spectral": lambda: spectral_norm(nn.Linear(8, 8)),
    "counting": Counting,
    "running": Running,
    "functional": Functional,
    "written": Written,
    "growing": Growing,
    "late": Late,
    "norm": Norm,
    "cumulative": lambda: Norm(momentum=None),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(8, 8), KINDS[kind](), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.stem(noise)).tanh()).square().mean()


def bits(net: nn.Module) -> dict[str, bytes]:
    named = [*net.named_parameters(), *net.named_buffers()]
    return {name: bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in named}


def start(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    net = Net(kind)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(leaves: bool) -> dict[str, dict[str, bytes]]:
    """All kinds on these ranks; their weights and buffers."""
    found = {}
    for kind in KINDS:
        net, optimizer = start(kind)
        model = syncengine.Parallel(net)
        batches = syncengine.micro_batches(model, loader(), total=TOTAL, seed=5)
        for step in range(STEPS):
            if leaves and step % 2:
                for at, (_, batch) in enumerate(batches):
                    if at == syncengine.rank() % 2:
                        break
                    model(*batch).backward()
            for _, batch in batches:
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = bits(net)
    return found


def seed(*key: object) -> None:
    torch.manual_seed(zlib.crc32(" ".join(map(str, key)).encode()))


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return tree(parts[:half]) + tree(parts[half:])


def plain() -> dict[str, dict[str, bytes]]:
    """In torch alone: each micro-batch on a copy of the whole model, of which the last gives it its buffers."""
    found = {}
    data, batches = Augmented(), loader()
    for kind in KINDS:
        net, optimizer = start(kind)
        for step in range(STEPS):
            seed(5, "epoch", 0)
            order = list(batches.batch_sampler)[step * TOTAL :]
            copies = []
            for i in range(TOTAL):
                seed(5, step, i, "samples")
                random.seed(zlib.crc32(f"5 {step} {i} samples".encode()))
                batch = batches.collate_fn([data[index] for index in order[i]])
                seed(5, step, i)
                copies.append(copy.deepcopy(net))
                copies[-1](*batch).backward()
            for p, *grads in zip(net.parameters(), *(one.parameters() for one in copies), strict=True):
                p.grad = tree([one.grad for one in grads]) * (1 / TOTAL)
            for module, last in zip(net.modules(), copies[-1].modules(), strict=True):
                module._buffers = last._buffers
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = bits(net)
    return found


@pytest.mark.parametrize(
    ("world", "leaves"), mostly_nightly([(1, False), (2, False), (3, False), (2, True), (3, True)], 0, 4)
)
def test_buffers_are_those_of_a_plain_loop(pool: RankPool, world: int, leaves: bool):
    (expected,) = pool.run(plain, world=1, settings=None)
    for answer in pool.run(train, leaves, world=world, timeout=200):
        for kind in KINDS:
            assert answer[kind] == expected[kind], kind


class Large(nn.Module):
    def __init__(self, writes: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("table", torch.zeros(4100, 1024))
        self._writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._writes == "in place":
            self.table[0, 0] += 1
        elif self._writes == "another":
            self.table = self.table + 1
        return self.linear(x) * (1 + self.table[0, 0])


def large(writes: str) -> float:
    torch.manual_seed(0)
    net = Large(writes)
    model = syncengine.Parallel(net)
    data = torch.utils.data.DataLoader(torch.randn(64, 4), 2, drop_last=True)
    batches = syncengine.micro_batches(model, data, total=4)
    for _ in range(2):
        for _, x in batches:
            model(x).square().mean().backward()
        model.zero_grad()
    return net.table[0, 0].item()


@pytest.mark.parametrize("world", [1, 2])
def test_large_buffers_are_not_written_in_place(pool: RankPool, world: int):
    assert pool.run(large, "nothing", world=world) == [0.0] * world
    assert pool.run(large, "another", world=world) == [2.0] * world
    with pytest.raises(RankFailure, match=r"InvalidUsage: .*buffer table was written in micro-batch"):
        pool.run(large, "in place", world=world)
