"""ResNet-18: 11.7 million parameters in 62 tensors, BatchNorm's statistics in buffers."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from models.workload import Workload


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + shortcut)


class ResNet18(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(Block(inputs, outputs, 1 if i == 0 else 2), Block(outputs, outputs, 1))
                for i, (inputs, outputs) in enumerate(itertools.pairwise(widths))
            )
        )
        self.fc = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        return self.fc(self.layers(x).mean((2, 3)))


class Images(Workload):
    memory_format = torch.contiguous_format

    def model(self) -> nn.Module:
        model = ResNet18().to(memory_format=self.memory_format)
        assert sum(p.numel() for p in model.parameters()) == 11_689_512  # as the original
        return model

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        images = torch.randn(4, 3, 32, 32, generator=generator).to(memory_format=self.memory_format)
        return F.cross_entropy(model(images), torch.randint(1000, (4,), generator=generator))


class ChannelsLastImages(Images):
    memory_format = torch.channels_last
