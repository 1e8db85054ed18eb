"""The torch.distributed backend on CUDA tensors, beside Gloo on the same values. Skipped where there is no GPU."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cuda_training import on_gpus
from models.workload import same_bits
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import syncengine


def groups() -> dist.ProcessGroup:
    """The default group is ours; returns Gloo's, the oracle."""
    dist.init_process_group("syncengine", timeout=timedelta(seconds=60))
    return dist.new_group(backend="gloo")


def values(size: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(1, 50, (size,), generator=generator).to(dtype)


def all_gather_list(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts)


def all_gather_single(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = tensor.new_empty(dist.get_world_size() * tensor.numel())
    dist.all_gather_into_tensor(parts, tensor, group=group)
    return parts


def reduce_scatter_list(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    world = dist.get_world_size()
    result = tensor.new_empty(tensor.numel() // world)
    dist.reduce_scatter(result, [part.contiguous() for part in tensor.chunk(world)], group=group)
    return result


def reduced(op: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor]:
    def call(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        dist.all_reduce(tensor, op, group=group)
        return tensor

    return call


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.broadcast(tensor, dist.get_world_size() - 1, group=group)
    return tensor


def reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.reduce(tensor, 0, group=group)
    return tensor if dist.get_rank() == 0 else torch.zeros_like(tensor)  # Gloo leaves anything elsewhere


def asynchronous(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return tensor * 2


def in_future(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda f: f.value()[0] * 3).wait()


def not_contiguous(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    part = tensor[::2] if group is None else tensor[::2].contiguous()  # Gloo would sum what lies in between
    dist.all_reduce(part, group=group, async_op=True).wait()
    tensor[::2] = part
    return tensor


CALLS = {
    "sum": reduced(dist.ReduceOp.SUM),
    "max": reduced(dist.ReduceOp.MAX),
    "xor": reduced(dist.ReduceOp.BXOR),
    "all_gather": all_gather_list,
    "all_gather_into_tensor": all_gather_single,
    "reduce_scatter": reduce_scatter_list,
    "broadcast": broadcast,
    "reduce": reduce,
    "async": asynchronous,
    "future": in_future,
    "strided": not_contiguous,
}


@on_gpus(in_job=False)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_are_those_of_gloo(rank: int, world: int):
    oracle = groups()
    wrong = []
    for name, call in CALLS.items():
        for dtype in (torch.int64,) if name == "xor" else (torch.float32, torch.int32):
            for size in (24, 840, 840 * 1000):
                on_gpu, on_cpu = call(values(size, dtype).cuda(), None), call(values(size, dtype), oracle)
                if not torch.equal(on_gpu.cpu(), on_cpu):
                    wrong.append(f"{name} {dtype} {size}")
    return wrong


@on_gpus(in_job=False)
def test_coalesced_calls_are_one_work(rank: int):
    groups()
    tensors = [torch.full((1000,), float(rank + i), device="cuda") for i in range(3)]
    with _coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert len(manager.works) == 1
    manager.wait()
    sums = [float(tensor[-1]) for tensor in tensors]
    assert sums == [1.0, 3.0, 5.0], sums


@on_gpus(in_job=False)
def test_tensors_on_two_devices_are_refused_before_anything_begins(rank: int):
    groups()
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    on_gpu, on_cpu = torch.full((1000,), 1.0 + rank, device="cuda"), torch.full((3,), 1.0 + rank)
    backend._start_coalescing()
    backend.allreduce([on_gpu])
    with pytest.raises(syncengine.errors.InvalidUsage, match="tensors on cuda:0 and on cpu in one call"):
        backend.allreduce([on_cpu])
    dist.barrier()
    torch.cuda.synchronize()
    found = float(on_gpu[-1]), float(on_cpu[-1])
    assert found == (3.0, 1.0 + rank), found


@on_gpus(in_job=False)
def test_calls_follow_the_current_stream_and_do_not_wait_on_the_host(rank: int):
    """Calls see what their stream has queued, and return at once: rank 1 makes its own when rank 0's have returned."""
    oracle = groups()
    tensor = torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(tensor)  # connects
    torch.cuda.synchronize()
    if rank == 1:
        dist.barrier(group=oracle)
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    if rank == 0:
        dist.barrier(group=oracle)
    assert tensor[-1] == 6.0, tensor[-1]


@on_gpus(in_job=False)
def test_messages_are_refused_by_name(rank: int):
    groups()
    with pytest.raises(syncengine.errors.InvalidUsage) as error:
        dist.send(torch.ones(1, device="cuda"), 1 - rank)
    assert all(part in str(error.value) for part in ("send", "cuda:0", "nccl")), error.value


@on_gpus(in_job=False)
def test_torch_ddp_trains_on_it_with_the_bits_of_gloo(rank: int):
    oracle = groups()
    models = []
    for group in (None, oracle):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 500), nn.Tanh(), nn.Linear(500, 3)).cuda()
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(6, 24).cuda()).square().mean().backward()
            optimizer.step()
        models.append(net)
    assert all(same_bits(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
