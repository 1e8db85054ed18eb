"""The models whose training steps are measured, with batches that keep one core busy for 10 to 100 ms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.model import GPT, GPTConfig


@dataclass(frozen=True)
class Workload:
    """A model, its loss, and batches that depend on the generator only."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  # (inputs, targets)


def mlp() -> nn.Module:
    """Ten square layers: 10.5 M parameters, and little work per parameter."""
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def large_mlp() -> nn.Module:
    """Sixteen layers of width 2048: 67 M parameters, more than any cache holds."""
    layers: list[nn.Module] = []
    for _ in range(16):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def many_small(count: int) -> nn.Module:
    """So many layers of width 16, two parameters each: the cost per gradient counts rather than the bytes."""
    layers = [nn.Linear(16, 16) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # or values would vanish on so long a way
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def gpt() -> nn.Module:
    """The example's GPT in a larger shape: 4.9 M parameters."""
    return GPT(GPTConfig(vocabulary=512, layers=6, heads=4, width=256))


def conv_net() -> nn.Module:
    """Seven convolutions, each with BatchNorm: 2.3 M parameters, much work per parameter, and buffers."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def vectors(batch: int, width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Random inputs and targets [batch, width]."""
    return lambda g: (torch.randn(batch, width, generator=g), torch.randn(batch, width, generator=g))


def windows(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens [2, 64] and the same moved on by one."""
    tokens = torch.randint(512, (2, 65), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four random images and their classes."""
    return torch.randn(4, 3, 32, 32, generator=g), torch.randint(10, (4,), generator=g)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", mlp, F.mse_loss, vectors(32, 1024)),
        Workload("gpt", gpt, next_token_loss, windows),
        Workload("conv", conv_net, F.cross_entropy, images),
        Workload("small", partial(many_small, 500), F.mse_loss, vectors(8, 16)),
        Workload("many", partial(many_small, 5000), F.mse_loss, vectors(8, 16)),
    )
}

LARGE = {"mlp67": Workload("mlp67", large_mlp, F.mse_loss, vectors(32, 2048))}  # for what a step does to weights
