"""What the tests of ``Parallel`` on CUDA share: the job around a rank's body, batches, a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import syncengine


def deterministic() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def job(timeout: float = 60.0) -> Iterator[None]:
    """syncengine and Gloo, which is the oracle: it takes CUDA tensors over the host. Or the group that is there."""
    deterministic()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    syncengine.init(timeout=timeout)
    yield
    torch.cuda.synchronize()
    syncengine.shutdown()
    dist.destroy_process_group()


def batch(step: int, rank: int | None = None, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(size, 24, generator=generator).cuda()


def graph_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The loss, without its graph, which a capture must not meet."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
