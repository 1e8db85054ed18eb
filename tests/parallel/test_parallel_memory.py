"""Averages are written early only into memory that nobody else reads: each trap that autograd's sharing sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from parallel_models import CAP, Mlp
from pool import RankPool, run_on_ranks
from random_layers import Delay, Layer
from torch import nn

import syncengine

SHAPES: dict[str, Any] = {"w": (8, 8), "a": 64, "b": 64}


def trap(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Parameters whose gradients autograd makes as views of each other, or of what it still needs."""
    return Layer(forward, **{name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})


def added_view(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Delay.apply(x @ m.w) + m.a.view(8, 8) + (x @ m.b.view(8, 8))


@run_on_ranks()
def test_others_keep_their_local_gradients():
    """Whoever else looks at a gradient's memory sees the local gradient for good."""
    rank = syncengine.rank()
    model = syncengine.Parallel(trap(lambda m, x: m.kept + m.b.view(8, 8) + x), **CAP)
    inner = model.module
    inner.w.requires_grad_(False)
    kept_by_hook = []
    inner.b.register_hook(lambda grad: kept_by_hook.append(grad.detach()))
    inner.kept = inner.a.view(8, 8)
    inner.kept.retain_grad()
    x = torch.zeros(8, 8, requires_grad=True)
    factor = torch.full((8, 8), float(rank + 1))
    (model(x) * factor).sum().backward()
    assert torch.equal(inner.a.grad, torch.full((64,), 1.5))
    assert torch.equal(inner.b.grad, torch.full((64,), 1.5))
    assert torch.equal(inner.kept.grad, factor)
    assert torch.equal(x.grad, factor)
    assert torch.equal(kept_by_hook[0], factor.view(64))


class FromNumpy(torch.autograd.Function):
    """Its gradient lies in an array that somebody else owns."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, array: numpy.ndarray) -> torch.Tensor:
        ctx.array = array
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.array), None


@run_on_ranks()
def test_memory_of_others_is_not_written():
    rank = syncengine.rank()
    array = numpy.full(64, float(rank), dtype=numpy.float32)
    module = trap(lambda m, x: FromNumpy.apply(m.a, array))
    module.w.requires_grad_(False)
    module.b.requires_grad_(False)
    model = syncengine.Parallel(module, **CAP)
    model(torch.zeros(1)).backward()
    assert torch.equal(module.a.grad, torch.full((64,), 0.5))
    assert (array == rank).all()


def check_copies() -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    found = {}
    plain = syncengine.Parallel(Mlp())
    for set_to_none in (True, False):
        plain(torch.randn(3, 24)).sum().backward()
        found[f"plain {set_to_none}"] = plain.sync_stats()
        plain.zero_grad(set_to_none=set_to_none)
    hooked = syncengine.Parallel(Mlp())
    for p in hooked.parameters():
        p.register_hook(lambda grad: grad * 2)  # a gradient made by Python code is still autograd's alone
    hooked(torch.randn(3, 24)).sum().backward()
    found["hooked"] = hooked.sync_stats()
    shared = syncengine.Parallel(trap(added_view), **CAP)
    shared(torch.randn(8, 8)).square().sum().backward()
    found["shared"] = shared.sync_stats()
    layout = syncengine.Parallel(trap(added_view), **CAP)
    layout.module.w.grad = torch.zeros(8, 8).t().contiguous().t()
    layout(torch.randn(8, 8)).square().sum().backward()
    found["layout"] = layout.sync_stats()
    return found


def test_only_shared_or_strided_gradients_are_copied(pool: RankPool):
    size = 4 * sum(p.numel() for p in Mlp().parameters())
    for found in pool.run(check_copies):
        copied = {name: {k: n for k, n in stats["copied_bytes"].items() if n} for name, stats in found.items()}
        small = sum(p.nbytes for p in Mlp().parameters() if p.nbytes < 4096)
        assert all(reasons.pop("small", 0) <= small for reasons in copied.values())
        assert copied["plain True"] == copied["plain False"] == copied["hooked"] == {}
        assert found["plain True"]["reduced_bytes"] == size
        assert copied["shared"] == {"shared storage": 4 * 64}
        assert copied["layout"] == {"shared storage": 4 * 64, "layout": 4 * 64}
