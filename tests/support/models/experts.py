"""A mixture of experts with hard routing: in each step a rank uses some parts of the model, and others not at all."""

import torch
from torch import nn

import syncengine
from models.workload import Workload

WIDTH = 48


class Experts(nn.Module):
    """Two layers of experts; one head per task."""

    def __init__(self, experts: int = 5, tasks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(experts)
            )
            for _ in range(2)
        )
        self.heads = nn.ModuleDict({f"task {i}": nn.Linear(WIDTH, 5) for i in range(tasks)})

    def forward(self, x: torch.Tensor, routes: tuple[int, ...], task: str) -> torch.Tensor:
        x = self.stem(x)
        for layer, expert in zip(self.layers, routes, strict=True):
            if expert < len(layer):  # else the layer is skipped
                x = x + layer[expert](x)
        return self.heads[task](x)


class Routed(Workload):
    options = {"find_unused_parameters": True}  # noqa: RUF012
    steps = 6

    def model(self) -> nn.Module:
        return Experts()

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        rank = syncengine.rank()
        # The ranks agree sometimes; the last two steps use one expert on rank 0 alone; `task 2` is never used.
        routes = (step * 2 + rank) % 6, 5 if step >= 4 and rank else step % 5
        x = torch.randn(7, WIDTH, generator=generator)
        return model(x, routes, f"task {(step // 3 + rank * step) % 2}").square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
