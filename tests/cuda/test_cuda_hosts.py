"""CUDA tensors between hosts, which SYNCENGINE_HOST_ID makes: bits, training, streams, graphs, groups, faults.

Skipped where there is no GPU; `make gpu` runs them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import test_cuda_parallel
import torch
import torch.distributed as dist
from cuda_ranks import alone, marked, run_processes
from cuda_training import job
from test_cuda_conformance import NUMERICS, conformance
from test_cuda_equality import Run, differ
from test_cuda_lost_steps import STEPS, loses_steps_of_settings
from test_cuda_parallel import averages_on_streams
from test_cuda_parallel_faults import suffers

import syncengine
from syncengine.errors import SyncError


def live_on(hosts: str, rank: int) -> None:
    os.environ["SYNCENGINE_HOST_ID"] = hosts[rank]


def run(hosts: str, body: Any, environ: dict[str, str] | None = None, **options: Any) -> list[Any]:
    """body(rank) on a rank for each letter; equal letters share a host."""
    return run_processes(len(hosts), body, environ={"HOSTS": hosts, **(environ or {})}, **options)


def begin(rank: int) -> None:
    """Before syncengine.init()."""
    live_on(os.environ["HOSTS"], rank)


def went_through_the_host(communicator: syncengine.Communicator) -> str:
    counters = communicator.counters()
    return "good" if counters.get("cuda_relayed_bytes", 0) > 0 else str(counters)


# ---- bits ----


def gives_the_cpus_bits(rank: int) -> str:
    begin(rank)
    communicator = syncengine.init(numerics=os.environ["NUMERICS"], timeout=60.0)
    conformance(communicator, "hosts", most=40)
    outcome = went_through_the_host(communicator)
    syncengine.shutdown()
    return outcome


@marked
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hosts", ["ab", "aab", "abcab"])
def test_gpu_and_cpu_ranks_give_the_same_bits(hosts: str, numerics: str):
    assert run(hosts, gives_the_cpus_bits, {"NUMERICS": numerics}) == ["good"] * len(hosts)


# ---- training ----

RUNS = [
    Run(),
    Run(dtype=torch.bfloat16, accumulate=2),
    Run(autocast=torch.float16),
    Run(options=(("find_unused_parameters", True),)),
]


def trains_as_ddp(rank: int) -> list[str]:
    begin(rank)
    with job():
        return differ(RUNS) or [went_through_the_host(syncengine.init())]


@marked
def test_two_hosts_train_bit_equal_to_ddp():
    assert run("ab", trains_as_ddp) == [["good"], ["good"]]


def on_streams(rank: int) -> str:
    begin(rank)
    return averages_on_streams(rank)


def replays(rank: int) -> str:
    begin(rank)
    return test_cuda_parallel.replays(rank, warm_up_aside=True)


@marked
@pytest.mark.parametrize(("hosts", "body"), [("ab", on_streams), ("aab", replays)])
def test_streams_and_graphs(hosts: str, body: Any):
    assert run(hosts, body) == ["good"] * len(hosts)


# ---- groups ----


def in_groups(rank: int) -> str:
    """Some of the ranks: by split(), by Parallel over a process group, by the backend "syncengine"."""
    begin(rank)
    dist.init_process_group("gloo")
    communicator = syncengine.init(timeout=60.0)
    part = communicator.split([0, 2] if rank != 1 else [])
    group = dist.new_group([0, 2])
    backend = dist.new_group([0, 2], backend="syncengine")
    if rank == 1:
        outcome = "good"
    else:
        tensor = torch.full((1000,), float(rank + 1), device="cuda")
        part.all_reduce(tensor)
        assert tensor.eq(4.0).all()
        dist.all_reduce(tensor, group=backend)
        assert tensor.eq(8.0).all()
        model = syncengine.Parallel(torch.nn.Linear(3, 1).cuda(), process_group=group)
        model(torch.full((1, 3), float(rank + 1), device="cuda")).sum().backward()
        assert model.module.weight.grad.eq(2.0).all()
        outcome = went_through_the_host(part)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    syncengine.shutdown()
    return outcome


@marked
def test_groups_of_some_ranks():
    assert run("aab", in_groups) == ["good"] * 3


def as_backend(rank: int) -> str:
    begin(rank)
    dist.init_process_group("syncengine")
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.full((300_000,), float(rank + 1), device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    doubled = tensor * 2
    assert torch.equal(doubled.cpu(), torch.full((300_000,), 6.0))
    dist.barrier()
    dist.destroy_process_group()
    return "good"


@marked
def test_torch_distributed():
    assert run("ab", as_backend) == ["good"] * 2


# ---- faults ----

FAULTS = [  # of rank 1: its kind, whether it ends the process, and the survivor's error
    ("killed", 1, "PeerLost", "rank 1"),
    ("forward", None, "Aborted", "rank 1 raised in forward: ZeroDivisionError"),
]


def suffers_here(rank: int, kind: str) -> Any:
    begin(rank)
    return suffers(rank, kind)


@alone
@marked
@pytest.mark.parametrize(("kind", "killed", "error", "text"), FAULTS)
def test_a_failing_rank(kind: str, killed: int | None, error: str, text: str):
    name, said, is_nan = run("ab", functools.partial(suffers_here, kind=kind), killed=killed)[0]
    assert name == error and text in said
    assert is_nan, "trained on gradients that were not reduced"


def loses_steps_here(rank: int) -> list[int]:
    begin(rank)
    return loses_steps_of_settings(rank, ["plain", "weight"])


@marked
def test_a_rank_out_of_memory_costs_a_step():
    lost, others = run("ab", loses_steps_here)
    assert lost == others and all(5 < n < STEPS - 2 for n in lost), (lost, others)


def outcome_of(communicator: syncengine.Communicator, tensor: torch.Tensor) -> tuple[bool, str]:
    """Whether `tensor` is NaN once its stream has come to an end, and what the next call says."""
    torch.cuda.synchronize()  # no stream waits for ever
    is_nan = bool(tensor.isnan().all())
    try:
        communicator.all_reduce(tensor)
    except SyncError as error:
        return is_nan, f"{type(error).__name__}: {error}"
    return is_nan, "no error"


def differs(rank: int, counts: tuple[int, int], ops: tuple[str, str]) -> tuple[bool, str]:
    begin(rank)
    communicator = syncengine.init(timeout=60.0)
    communicator.barrier(device=torch.device("cuda"))
    tensor = torch.ones(counts[rank], device="cuda")
    communicator.all_reduce(tensor, ops[rank])
    return outcome_of(communicator, tensor)


@marked
@pytest.mark.parametrize(("counts", "ops"), [((1000, 2000), ("sum", "sum")), ((1000, 1000), ("sum", "max"))])
def test_ranks_that_call_something_else(counts: tuple[int, int], ops: tuple[str, str]):
    for is_nan, said in run("ab", functools.partial(differs, counts=counts, ops=ops)):
        assert is_nan
        assert said.startswith("Mismatch: rank "), said
        assert "on CUDA tensors" in said
        assert "all ranks must make the same calls" in said


def leaves(rank: int) -> tuple[bool, str]:
    begin(rank)
    communicator = syncengine.init(timeout=60.0)
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        syncengine.shutdown()
        return True, ""
    communicator.all_reduce(tensor)
    return outcome_of(communicator, tensor)


@marked
def test_a_rank_that_leaves():
    is_nan, said = run("ab", leaves)[0]
    assert is_nan
    assert said.startswith("PeerLost: ") and "rank 1 has left" in said
