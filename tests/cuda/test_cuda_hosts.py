"""CUDA tensors between hosts, which SYNCENGINE_HOST_ID makes: bits, training, streams, graphs, groups, faults."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import alone, marked, run_processes
from cuda_training import on_gpus
from test_cuda_conformance import NUMERICS, conformance
from test_cuda_equality import Run, differ
from test_cuda_lost_steps import STEPS, loses_steps_of_settings
from test_cuda_parallel import averages_on_streams, replays
from test_cuda_parallel_faults import suffers

import syncengine
from syncengine.errors import SyncError


def check_that_the_host_relayed(communicator: syncengine.Communicator) -> None:
    counters = communicator.counters()
    assert counters.get("cuda_relayed_bytes", 0) > 0, counters


# ---- bits ----


@on_gpus(in_job=False)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hosts", ["ab", "aab", "abcab"])
def test_gpu_and_cpu_ranks_give_the_same_bits(rank: int, hosts: str, numerics: str):
    communicator = syncengine.init(numerics=numerics, timeout=60.0)
    conformance(communicator, "hosts", most=40)
    check_that_the_host_relayed(communicator)
    syncengine.shutdown()


# ---- training ----

RUNS = [
    Run(),
    Run(dtype=torch.bfloat16, accumulate=2),
    Run(autocast=torch.float16),
    Run(options=(("find_unused_parameters", True),)),
]


@on_gpus(hosts="ab")
def test_two_hosts_train_bit_equal_to_ddp(rank: int):
    different = differ(RUNS)
    check_that_the_host_relayed(syncengine.default_communicator())
    return different


@marked
@pytest.mark.parametrize(
    ("hosts", "body"), [("ab", averages_on_streams), ("aab", functools.partial(replays, warm_up_aside=True))]
)
def test_streams_and_graphs(hosts: str, body: Any):
    assert run_processes(len(hosts), body, hosts=hosts) == ["good"] * len(hosts)


# ---- groups ----


@on_gpus(hosts="aab", in_job=False)
def test_groups_of_some_ranks(rank: int):
    """By split(), by Parallel over a process group, by the backend "syncengine"."""
    dist.init_process_group("gloo")
    communicator = syncengine.init(timeout=60.0)
    part = communicator.split([0, 2] if rank != 1 else [])
    group = dist.new_group([0, 2])
    backend = dist.new_group([0, 2], backend="syncengine")
    if rank != 1:
        tensor = torch.full((1000,), float(rank + 1), device="cuda")
        part.all_reduce(tensor)
        assert tensor.eq(4.0).all()
        dist.all_reduce(tensor, group=backend)
        assert tensor.eq(8.0).all()
        model = syncengine.Parallel(torch.nn.Linear(3, 1).cuda(), process_group=group)
        model(torch.full((1, 3), float(rank + 1), device="cuda")).sum().backward()
        assert model.module.weight.grad.eq(2.0).all()
        check_that_the_host_relayed(part)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    syncengine.shutdown()


@on_gpus(hosts="ab", in_job=False)
def test_torch_distributed(rank: int):
    dist.init_process_group("syncengine")
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.full((300_000,), float(rank + 1), device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    doubled = tensor * 2
    assert torch.equal(doubled.cpu(), torch.full((300_000,), 6.0))
    dist.barrier()
    dist.destroy_process_group()


# ---- faults ----


@alone
@marked
@pytest.mark.parametrize(
    ("kind", "killed", "error", "text"),
    [
        ("killed", 1, "PeerLost", "rank 1"),
        ("forward", None, "Aborted", "rank 1 raised in forward: ZeroDivisionError"),
    ],
)
def test_a_failing_rank(kind: str, killed: int | None, error: str, text: str):
    name, said, is_nan = run_processes(2, functools.partial(suffers, kind=kind), killed=killed, hosts="ab")[0]
    assert name == error and text in said
    assert is_nan, "trained on gradients that were not reduced"


@marked
def test_a_rank_out_of_memory_costs_a_step():
    body = functools.partial(loses_steps_of_settings, settings=["plain", "weight"])
    lost, others = run_processes(2, body, hosts="ab")
    assert lost == others and all(5 < n < STEPS - 2 for n in lost), (lost, others)


def error_after(communicator: syncengine.Communicator, tensor: torch.Tensor) -> str:
    """The next call's error: `tensor` is NaN once its stream has come to an end."""
    torch.cuda.synchronize()  # no stream waits for ever
    assert tensor.isnan().all()
    with pytest.raises(SyncError) as error:
        communicator.all_reduce(tensor)
    return f"{error.typename}: {error.value}"


@on_gpus(hosts="ab", in_job=False)
@pytest.mark.parametrize(("counts", "ops"), [((1000, 2000), ("sum", "sum")), ((1000, 1000), ("sum", "max"))])
def test_ranks_that_call_something_else(rank: int, counts: tuple[int, int], ops: tuple[str, str]):
    communicator = syncengine.init(timeout=60.0)
    communicator.barrier(device=torch.device("cuda"))
    tensor = torch.ones(counts[rank], device="cuda")
    communicator.all_reduce(tensor, ops[rank])
    said = error_after(communicator, tensor)
    assert said.startswith("Mismatch: rank "), said
    assert "on CUDA tensors" in said, said
    assert "all ranks must make the same calls" in said, said


@on_gpus(hosts="ab", in_job=False)
def test_a_rank_that_leaves(rank: int):
    communicator = syncengine.init(timeout=60.0)
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        syncengine.shutdown()
    else:
        communicator.all_reduce(tensor)
        said = error_after(communicator, tensor)
        assert said.startswith("PeerLost: ") and "rank 1 has left" in said, said
