"""torch's own DDP, FSDP2, DTensor and distributed checkpoints over the backend "syncengine", beside Gloo."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import Mlp, different_bits
from pool import run_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_backend_values import ours

STEPS = 4


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model after some steps, and its whole parameters."""
    torch.manual_seed(0)
    model = wrap(Mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
    return model, [full(p).detach().clone() for p in model.parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def over_both(wrap: Callable[[dist.ProcessGroup, nn.Module], nn.Module]) -> None:
    """At 2 ranks there is one order of summation, so the bits are the same."""
    results = [train(partial(wrap, group))[1] for group in (dist.group.WORLD, ours())]
    assert not different_bits(*results)


@pytest.mark.thorough
@run_on_ranks(gloo=True, settings=None)
def test_ddp_trains_to_the_bits_of_gloo() -> None:
    for options in ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        over_both(lambda group, m, options=options: DistributedDataParallel(m, process_group=group, **options))


@run_on_ranks(gloo=True, settings=None)
def test_ddp_with_a_communication_hook() -> None:
    def wrap(group: dist.ProcessGroup, module: nn.Module) -> nn.Module:
        model = DistributedDataParallel(module, process_group=group)
        model.register_comm_hook(group, fp16_compress_hook)
        return model

    over_both(wrap)


@pytest.mark.thorough
@run_on_ranks(gloo=True, settings=None)
def test_fsdp2_trains_to_the_bits_of_gloo() -> None:
    over_both(lambda group, module: fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu")))


@run_on_ranks(gloo=True, settings=None)
def test_dtensor_redistributes_as_over_gloo() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    results = []
    for group in (dist.group.WORLD, ours()):
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(1)
        a, b = torch.randn(8, 6), torch.randn(6, 10)
        product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        moved = distribute_tensor(a, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
        results.append([product.full_tensor(), moved.to_local(), moved.redistribute(mesh, [Replicate()]).to_local()])
    assert not different_bits(*results)
    assert torch.equal(results[1][2], a)


@run_on_ranks(gloo=True, settings=None)
def test_a_sharded_model_is_saved_and_loaded(tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    group = ours()
    mesh = DeviceMesh.from_group(group, "cpu")
    model, saved = train(lambda module: fully_shard(module, mesh=mesh))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, process_group=group)
    torch.manual_seed(7)
    other = fully_shard(Mlp(), mesh=mesh)
    state: dict[str, Any] = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, process_group=group)
    other.load_state_dict(state["model"])
    assert not different_bits([full(p).detach() for p in other.parameters()], saved)


@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_ddp_ends_with_a_named_error() -> None:
    group, rank = ours(), dist.get_rank()
    model = DistributedDataParallel(Mlp(), process_group=group)
    model(data(0)).sum().backward()
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
        return
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        for step in range(2):
            model(data(step)).sum().backward()
