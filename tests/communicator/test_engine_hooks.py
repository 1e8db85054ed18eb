"""Communication hooks that need no torch.distributed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import CAP, Mlp, average, data, gradients
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import InvalidUsage

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")


def averages(hook: Any, dtype: torch.dtype, divides_first: bool = True) -> None:
    """Contributions in `dtype` are added in the order of ranks, in float32. Each of them is divided, or their sum."""
    assert not dist.is_initialized()
    torch.manual_seed(0)
    module = Mlp()
    local = []
    for rank in range(3):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
        local.append(torch.autograd.grad(module(x).square().mean(), list(module.parameters())))
    model = syncengine.Parallel(module, **CAP)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(data()).square().mean().backward()
    for grad, *parts in zip(gradients(model), *local, strict=True):
        first, second, third = (part.to(dtype).div_(3 if divides_first else 1).float() for part in parts)
        total = (first + second + third) * (1.0 if divides_first else 1 / 3)
        assert torch.equal(grad, total.to(dtype).to(grad.dtype))


@run_on_ranks(world=3)
def test_compression_over_the_engine():
    averages(syncengine.hooks.fp16_compress, torch.float16)
    averages(syncengine.hooks.bf16_compress, torch.bfloat16)
    model = syncengine.Parallel(Mlp())
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    model(data()).square().mean().backward()
    stats = model.sync_stats()
    assert stats["reduced_bytes"] == sum(p.nbytes for p in model.parameters()) // 2
    assert stats["copied_bytes"]["compression"] == stats["reduced_bytes"]
    with pytest.raises(InvalidUsage, match="state None"):
        syncengine.Parallel(Mlp()).register_comm_hook(object(), syncengine.hooks.bf16_compress)


@run_on_ranks(world=3)
def test_a_hook_over_the_communicator():
    def compress(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return syncengine.hooks.fp16_compress(state, bucket)  # called, not registered: blocks

    averages(compress, torch.float16)
    averages(average, torch.float32, divides_first=False)


@run_on_ranks()
def test_complex_gradients_are_not_compressed():
    model = syncengine.Parallel(nn.Linear(24, 3, dtype=torch.complex64))
    with pytest.raises(InvalidUsage, match="weight is complex"):
        model.register_comm_hook(None, syncengine.hooks.fp16_compress)


@run_on_ranks(world=1)
def test_alone_gradients_are_rounded_as_well():
    torch.manual_seed(0)
    model = syncengine.Parallel(nn.Linear(24, 2))
    model.register_comm_hook(None, syncengine.hooks.bf16_compress)
    local = torch.autograd.grad(model.module(data()).square().sum(), list(model.parameters()))
    for _ in range(2):
        model.zero_grad()
        model(data()).square().sum().backward()
        assert all(map(torch.equal, gradients(model), [grad.bfloat16().float() for grad in local]))


@run_on_ranks(world=1)
def test_alone_hooks_run_as_well():
    seen = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        return syncengine.hooks.completed(bucket.buffer().mul_(3))

    module = nn.Linear(24, 2)
    model = syncengine.Parallel(module)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(data()).sum().backward()
    assert seen == [0, 0]
    tripled = module.weight.grad.clone()
    module.weight.grad = None
    model._remove_autograd_hooks()
    module(data()).sum().backward()
    assert torch.equal(tripled, 3 * module.weight.grad)
