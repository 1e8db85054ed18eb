"""Averages are written early only into memory that nobody else reads, and nothing reads memory that was freed."""

from typing import Any

import numpy
import pytest
import torch
from parallel_models import CAP, Mlp
from pool import run_on_ranks
from random_layers import Delay, Layer
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage, SyncError


def vector() -> nn.Parameter:
    return nn.Parameter(torch.randn(64))


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
def test_others_keep_their_local_gradients():
    """Whoever else looks at a gradient's memory sees the local gradient for good: a hook, the program, NumPy."""
    rank = syncengine.rank()
    array = numpy.full(64, float(rank), dtype=numpy.float32)
    vectors = {name: vector() for name in "abc"}
    module = Layer(lambda m, x: m.kept + m.b.view(8, 8) + x + FromNumpy.apply(m.c, array), **vectors)
    model = syncengine.Parallel(module, **CAP)
    kept_by_hook = []
    module.b.register_hook(lambda grad: kept_by_hook.append(grad.detach()))
    module.kept = module.a.view(8, 8)
    module.kept.retain_grad()
    x = torch.zeros(8, 8, requires_grad=True)
    factor = torch.full((8, 8), float(rank + 1))
    (model(x) * factor).sum().backward()
    for parameter, average in ((module.a, 1.5), (module.b, 1.5), (module.c, 0.5)):
        assert torch.equal(parameter.grad, torch.full((64,), average))
    assert torch.equal(module.kept.grad, factor)
    assert torch.equal(x.grad, factor)
    assert torch.equal(kept_by_hook[0], factor.view(64))
    assert (array == rank).all()


@run_on_ranks()
def test_only_shared_or_strided_gradients_are_copied():
    def copied(model: nn.Module, loss: torch.Tensor) -> dict[str, int]:
        """Bytes by reason, but for small gradients."""
        loss.backward()
        reasons = {reason: size for reason, size in model.sync_stats()["copied_bytes"].items() if size}
        assert reasons.pop("small", 0) <= sum(p.nbytes for p in Mlp().parameters() if p.nbytes < 4096)
        return reasons

    def added_view(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return Delay.apply(x @ m.w) + m.a.view(8, 8) + (x @ m.b.view(8, 8))

    plain = syncengine.Parallel(Mlp())
    for set_to_none in (True, False):
        assert copied(plain, plain(torch.randn(3, 24)).sum()) == {}
        assert plain.sync_stats()["reduced_bytes"] == sum(p.nbytes for p in plain.parameters())
        plain.zero_grad(set_to_none=set_to_none)
    hooked = syncengine.Parallel(Mlp())
    for p in hooked.parameters():
        p.register_hook(lambda grad: grad * 2)  # a gradient made by Python code is still autograd's alone
    assert copied(hooked, hooked(torch.randn(3, 24)).sum()) == {}
    for strided in ({}, {"layout": 4 * 64}):
        module = Layer(added_view, w=nn.Parameter(torch.randn(8, 8)), a=vector(), b=vector())
        shared = syncengine.Parallel(module, **CAP)
        module.w.grad = torch.zeros(8, 8).t().contiguous().t() if strided else None
        assert copied(shared, shared(torch.randn(8, 8)).square().sum()) == {"shared storage": 4 * 64, **strided}


# --- Memory that was freed: reading it would end the process by a signal


def net(elements: int) -> nn.Module:
    buffers = {"before": nn.Buffer(torch.ones(3)), "cache": nn.Buffer(torch.ones(elements))}
    return Layer(lambda self, x: self.layer(x), layer=nn.Linear(4, 4), **buffers)


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("elements", [97, 40_000])  # packed into a message; by itself
@run_on_ranks()
def test_a_buffer_that_was_freed_on_one_rank_is_named(elements: int, left: int, alone: int):
    model = syncengine.Parallel(net(elements))
    model(torch.ones(2, 4)).sum().backward()
    if syncengine.rank() == alone:
        model.module.cache.untyped_storage().resize_(left)
    prefix = "" if syncengine.rank() == alone else f"rank {alone}: "
    with pytest.raises(SyncError, match=rf"{prefix}the memory of cache of shape \({elements},\) was freed"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("which", ["cache", "layer.weight"])
@run_on_ranks()
def test_what_was_freed_before_wrapping_is_named(which: str):
    made = net(97)
    made.state_dict(keep_vars=True)[which].untyped_storage().resize_(0)
    with pytest.raises(InvalidUsage, match=f"the memory of {which} of shape"):
        syncengine.Parallel(made)
