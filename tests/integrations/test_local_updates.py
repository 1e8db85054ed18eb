"""examples/local_updates.py: torchft's LocalSGD and DiLoCo over our group have the bits of plain loops of torch."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import imported, load, torchrun
from lightning_ranks import same
from torch import nn


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Its model, data and sizes, in one thread, as its ranks have it."""
    with imported("local_updates.py") as module:
        yield module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    home = tmp_path_factory.mktemp("local_updates")
    return home / "out", torchrun("local_updates.py", "--out", home / "out", home=home, ranks=4)


def train_locally(example: ModuleType, module: nn.Module, optimizer: torch.optim.Optimizer, host: int, first: int):
    """EVERY steps on both batches of a host."""
    for step in range(first, first + example.EVERY):
        ranks = [torch.autograd.grad(example.loss_of(module, step, host, r), module.parameters()) for r in (0, 1)]
        for parameter, a, b in zip(module.parameters(), *ranks, strict=True):
            parameter.grad = (a + b) / 2
        optimizer.step()


def local_sgd(example: ModuleType) -> nn.Module:
    hosts = [example.make() for _ in range(2)]
    for first in range(1, example.STEPS + 1, example.EVERY):
        for host, (module, optimizer) in enumerate(hosts):
            train_locally(example, module, optimizer, host, first)
        with torch.no_grad():
            for a, b in zip(*(module.parameters() for module, _ in hosts), strict=True):
                a.copy_((a + b) / 2)
                b.copy_(a)
    return hosts[0][0]


def diloco(example: ModuleType) -> nn.Module:
    """Nesterov's momentum in the mean way of the hosts: DiLoCo's algorithm 1 (https://arxiv.org/abs/2311.08105)."""
    common, _ = example.make()
    hosts = [example.make() for _ in range(2)]
    momenta = [torch.zeros_like(p) for p in common.parameters()]
    for first in range(1, example.STEPS + 1, example.EVERY):
        for host, (module, optimizer) in enumerate(hosts):
            train_locally(example, module, optimizer, host, first)
        locals_ = zip(*(module.parameters() for module, _ in hosts), strict=True)
        with torch.no_grad():
            for parameter, momentum, (a, b) in zip(common.parameters(), momenta, locals_, strict=True):
                way = ((parameter - a) + (parameter - b)) / 2
                momentum.mul_(0.9).add_(way)
                parameter.add_(way.add(momentum, alpha=0.9), alpha=-0.7)
        for module, _ in hosts:
            module.load_state_dict(common.state_dict())
    return common


@pytest.mark.parametrize("plain", [local_sgd, diloco])
def test_bits_of_a_plain_loop(trained: tuple[Path, str], example: ModuleType, plain):
    weights = plain(example).state_dict()
    for rank in range(4):
        same(load(trained[0] / f"{plain.__name__}{rank}.pt"), weights)


def test_what_is_sent_and_what_is_learned(trained: tuple[Path, str], example: ModuleType):
    """Each host sends all weights once for EVERY steps."""
    out, said = trained
    found = {way: re.search(rf"{way}: loss (.*), then (.*); host 0 sent (\d+) bytes", said) for way in example.WAYS}
    sent = {way: int(match[3]) for way, match in found.items()}
    model = sum(p.numel() * p.element_size() for p in example.make()[0].parameters())
    assert sent["local_sgd"] == sent["diloco"] == model * example.STEPS // example.EVERY
    assert sent["synchronous"] >= model * example.STEPS
    assert all(float(match[2]) < float(match[1]) / 2 for match in found.values())
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
