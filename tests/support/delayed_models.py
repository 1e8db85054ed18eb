"""A model with parameters to delay (``delay_all_reduce_named_params``), and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import syncengine


class TwoParts(nn.Module):
    """Brings the gradients of its head, then of its table, then of `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(24, 16), nn.Linear(16, 4)
        self.first = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x * self.first))


def delaying(module: nn.Module, parts: Sequence[str] = ("table",)) -> dict[str, object]:
    """The arguments that delay all of these parts until `first` comes."""
    named = [(name, p) for name, p in module.named_parameters() if name.split(".")[0] in parts]
    return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": module.first}


def both_ways(
    train: Callable[[nn.Module], None],
    make: Callable[[], nn.Module] = TwoParts,
    parts: Sequence[str] = ("table",),
    **options: object,
) -> None:
    """The gradients and the model that `train` leaves are those of a model of which nothing is delayed."""
    results = []
    for delay in (True, False):
        torch.manual_seed(0)
        module = make()
        train(syncengine.Parallel(module, **(delaying(module, parts) if delay else {}), **options))
        results.append([tensor.clone() for p in module.parameters() for tensor in (p.grad, p.detach())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
