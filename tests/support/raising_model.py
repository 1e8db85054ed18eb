"""What runs in the middle of a backward, and a model that raises where it is told to."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn


class InBackward(torch.autograd.Function):
    """Runs a function in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return grad, None


class Bad(Exception):
    """Raised by the model."""


class Raising(nn.Module):
    """Raises where it is told to: "forward", or in backward "early", "middle" or "late"."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 300), nn.Linear(300, 300)
        self.where = ""

    def raise_at(self, where: str) -> None:
        if self.where == where:
            raise Bad(f"the batch is bad: {where}")

    @contextlib.contextmanager
    def raising(self, where: str, error: Any = Bad) -> Iterator[None]:
        """Raises there within the block, which ends by this error; raises nothing if `where` is empty."""
        self.where = where
        with pytest.raises(error) if where else contextlib.nullcontext():
            yield
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        x = InBackward.apply(x, lambda: self.raise_at("late"))
        x = self.first(x)
        self.raise_at("forward")
        x = InBackward.apply(x, lambda: self.raise_at("middle"))
        return InBackward.apply(self.last(x), lambda: self.raise_at("early"))
