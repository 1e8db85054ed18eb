"""The example's GPT: its embedding is its output layer too, so one gradient comes from both ends of backward."""

import torch
from torch import nn

from examples.gpt.model import GPT, GPTConfig
from models.workload import Workload


class Text(Workload):
    config = GPTConfig(vocabulary=96, context=32, layers=3, heads=4, width=192)

    def model(self) -> nn.Module:
        return GPT(self.config)

    def loss(self, model: nn.Module, generator: torch.Generator, step: int) -> torch.Tensor:
        text = torch.randint(self.config.vocabulary, (4, self.config.context + 1), generator=generator)
        return model(text[:, :-1], text[:, 1:])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
