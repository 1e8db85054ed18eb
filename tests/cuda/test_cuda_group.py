"""interhost="torch" with NCCL for CUDA tensors: between hosts, which SYNCENGINE_HOST_ID makes, from device to device.

Skipped where there is no GPU for each rank; `make gpu` runs them. On the device in software, what is called nccl is a
backend with its manners over Gloo (tests/cuda/torch/nccl.h).
"""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import Any

import pytest
import test_cuda_hosts
import torch
import torch.distributed as dist
from cuda_ranks import marked, needs_a_gpu_each, run_processes
from cuda_training import batch, job
from parallel_models import Mlp
from test_cuda_conformance import NUMERICS, conformance, same, values
from test_cuda_equality import differ
from test_cuda_hosts import FAULTS, RUNS, check_survivor, live_on
from test_cuda_parallel import averages_on_streams, check_average, exact_average, host_runs_ahead
from test_cuda_parallel_faults import suffers

import syncengine
from syncengine.errors import SyncError


def run(hosts: str, body: Any, environ: dict[str, str] | None = None, **options: Any) -> list[Any]:
    """body(rank) on a rank for each letter; equal letters share a host."""
    needs_a_gpu_each(len(hosts))
    environ = {"HOSTS": hosts, "SYNCENGINE_INTERHOST": "torch", **(environ or {})}
    return run_processes(len(hosts), body, environ=environ, **options)


def init_group(rank: int) -> None:
    live_on(os.environ["HOSTS"], rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")


def went_by_the_group(communicator: syncengine.Communicator) -> str:
    counters = communicator.counters()
    good = counters.get("cuda_fabric_bytes", 0) > 0 and "cuda_relayed_bytes" not in counters
    return "good" if good else str(counters)


# ---- bits ----


def gives_the_cpus_bits(rank: int) -> str:
    init_group(rank)
    communicator = syncengine.init(numerics=os.environ["NUMERICS"], timeout=60.0)
    conformance(communicator, "group", most=40)
    outcome = went_by_the_group(communicator)
    syncengine.shutdown()
    return outcome


@marked
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hosts", ["ab", "aab", "abba"])
def test_gpu_and_cpu_ranks_give_the_same_bits(hosts: str, numerics: str):
    assert run(hosts, gives_the_cpus_bits, {"NUMERICS": numerics}) == ["good"] * len(hosts)


def adds_by_hosts(rank: int) -> str:
    """Each host's sum, rounded, then these: the words of docs/numerics.md."""
    init_group(rank)
    hosts = os.environ["HOSTS"]
    communicator = syncengine.init(numerics="fast", timeout=60.0)
    for size in (1, 4095, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            sums = []
            for host in dict.fromkeys(hosts):
                parts = [values(r, size, dtype).float() for r in range(len(hosts)) if hosts[r] == host]
                sums.append(functools.reduce(torch.add, parts).to(dtype).float())
            expected = (functools.reduce(torch.add, sums) / len(hosts)).to(dtype)
            tensor = values(rank, size, dtype).cuda()
            communicator.all_reduce(tensor, "avg")
            assert same(tensor.cpu(), expected), (size, dtype)
    outcome = went_by_the_group(communicator)
    syncengine.shutdown()
    return outcome


@marked
@pytest.mark.parametrize("hosts", ["ab", "aabb", "abba"])
def test_fast_adds_the_sums_of_hosts(hosts: str):
    assert run(hosts, adds_by_hosts) == ["good"] * len(hosts)


def takes_several_pieces(rank: int) -> str:
    """More bytes than are staged at once; several calls are queued without a wait, and each rank is late in turn."""
    init_group(rank)
    for numerics in ("rank_order", "ring"):
        communicator = syncengine.init(numerics=numerics, timeout=60.0)
        on_cpu = values(rank, 9_000_001, torch.float32)
        on_gpu = on_cpu.cuda()
        for call in range(communicator.size):
            if call == rank:
                time.sleep(0.05)
            communicator.all_reduce(on_gpu, "avg")
        for _ in range(communicator.size):
            communicator.all_reduce(on_cpu, "avg")
        assert same(on_gpu.cpu(), on_cpu), numerics
        syncengine.shutdown()
    return "good"


@marked
def test_large_tensors():
    assert run("aab", takes_several_pieces) == ["good"] * 3


# ---- training ----


def trains_as_ddp(rank: int) -> list[str]:
    init_group(rank)
    with job():
        return differ(RUNS) or [went_by_the_group(syncengine.init())]


@marked
def test_two_hosts_train_bit_equal_to_ddp():
    assert run("ab", trains_as_ddp) == [["good"], ["good"]]


def two_models(rank: int) -> str:
    """Once their plans are made, a common backward comes by them in another order on each rank."""
    init_group(rank)
    with job():
        torch.manual_seed(3)
        models = [syncengine.Parallel(Mlp().cuda(), bucket_cap_mb=0.5) for _ in range(2)]
        for step in range(6):
            x = batch(step)
            expected = [exact_average(model.module, x) for model in models]
            in_turn = models if rank == 0 or step < 3 else models[::-1]
            for model in models:
                model.zero_grad()
            sum(model(x).square().mean() for model in in_turn).backward()
            for model, average in zip(models, expected, strict=True):
                check_average(model.module, average)
    return "good"


@marked
def test_two_models_in_two_orders():
    assert run("ab", two_models) == ["good"] * 2


def on_streams(rank: int) -> str:
    init_group(rank)
    return averages_on_streams(rank)


def runs_ahead(rank: int) -> str:
    init_group(rank)
    return host_runs_ahead(rank)


def replays(rank: int) -> str:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return test_cuda_hosts.replays(rank)


@marked
@pytest.mark.parametrize(("hosts", "body"), [("ab", on_streams), ("ab", runs_ahead), ("aab", replays)])
def test_streams_and_graphs(hosts: str, body: Any):
    assert run(hosts, body) == ["good"] * len(hosts)


# ---- groups ----


def in_groups(rank: int) -> str:
    """Some of the ranks: by split(), by Parallel over a process group, by the backend "syncengine"."""
    init_group(rank)
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
        outcome = went_by_the_group(part)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    syncengine.shutdown()
    return outcome


@marked
def test_groups_of_some_ranks():
    assert run("aab", in_groups) == ["good"] * 3


def outlives_the_programs_groups(rank: int) -> str:
    init_group(rank)
    for _ in range(2):
        communicator = syncengine.init(timeout=60.0)
        tensor = torch.ones(1000, device="cuda")
        communicator.all_reduce(tensor)
        if _ == 1:
            dist.destroy_process_group()
        communicator.all_reduce(tensor)
        assert tensor.eq(4.0).all()
        assert went_by_the_group(communicator) == "good"
        syncengine.shutdown()
    return "good"


@marked
def test_the_program_destroys_its_groups_first():
    assert run("ab", outlives_the_programs_groups) == ["good"] * 2


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("syncengine")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def takes_the_way_it_logs(rank: int) -> list[Any]:
    live_on(os.environ["HOSTS"], rank)
    dist.init_process_group(os.environ["BACKEND"])
    lines = Lines()
    communicator = syncengine.init(timeout=60.0)
    communicator.all_reduce(torch.ones(1000, device="cuda"))
    ways = [name for name in ("relayed", "fabric") if f"cuda_{name}_bytes" in communicator.counters()]
    syncengine.shutdown()
    return ways + [text for text in lines.texts if "CUDA" in text]


@marked
@pytest.mark.parametrize(
    ("backend", "way", "text"),
    [("gloo", "relayed", "through pinned memory"), ("cpu:gloo,cuda:nccl", "fabric", "by nccl")],
)
def test_the_way_is_that_which_is_logged(backend: str, way: str, text: str):
    line = f"CUDA tensors between hosts go {text}"
    assert run("ab", takes_the_way_it_logs, {"BACKEND": backend}) == [[way, f"INFO: {line}"], [way, f"DEBUG: {line}"]]


def nccl_alone(rank: int) -> str:
    live_on(os.environ["HOSTS"], rank)
    dist.init_process_group("nccl")
    try:
        syncengine.init(timeout=20.0)
    except SyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@marked
def test_nccl_alone_is_refused():
    said = run("ab", nccl_alone)
    assert all("has 'nccl' alone: initialize it with 'cpu:gloo,cuda:nccl'" in text for text in said), said
    assert any(text.startswith("InvalidUsage") for text in said), said


# ---- faults ----


def suffers_here(rank: int, kind: str) -> Any:
    init_group(rank)
    return suffers(kind)


@marked
@pytest.mark.parametrize(("kind", "killed", "error", "text"), FAULTS)
def test_a_failing_rank(kind: str, killed: int | None, error: str, text: str):
    check_survivor(run("ab", functools.partial(suffers_here, kind=kind), killed=killed)[0], error, text)


def outcome_of(communicator: syncengine.Communicator, tensor: torch.Tensor) -> tuple[bool, str]:
    """Whether `tensor` is NaN once its stream has come to an end, and what the next call says."""
    torch.cuda.synchronize()  # no stream waits for ever
    is_nan = bool(tensor.isnan().all())
    try:
        communicator.all_reduce(tensor)
    except SyncError as error:
        return is_nan, f"{type(error).__name__}: {error}"
    return is_nan, "no error"


def calls_something_else(rank: int) -> tuple[bool, str]:
    init_group(rank)
    communicator = syncengine.init(timeout=60.0)
    communicator.barrier(device=torch.device("cuda"))
    tensor = torch.ones(1000 + 1000 * rank, device="cuda")
    communicator.all_reduce(tensor)
    return outcome_of(communicator, tensor)


def calls_another_op(rank: int) -> tuple[bool, str]:
    """Nothing in the sizes says so: the bytes arrive."""
    init_group(rank)
    communicator = syncengine.init(timeout=60.0)
    communicator.barrier(device=torch.device("cuda"))
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor, ("sum", "max")[rank])
    return outcome_of(communicator, tensor)


@marked
@pytest.mark.parametrize("body", [calls_something_else, calls_another_op])
def test_ranks_that_call_something_else(body: Any):
    for is_nan, said in run("ab", body):
        assert is_nan
        assert said.startswith("Mismatch: rank "), said
        assert "on CUDA tensors" in said and "something else" in said


def comes_too_late(rank: int) -> tuple[bool, str]:
    init_group(rank)
    communicator = syncengine.init(timeout=2.0)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(6)
        return True, ""
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    return outcome_of(communicator, tensor)


@marked
def test_a_rank_that_does_not_come():
    is_nan, said = run("ab", comes_too_late)[0]
    assert is_nan
    assert said.startswith("Timeout: rank 0 waits for other ranks since 2."), said
    assert "all_reduce(sum, float32, 1000 elements) on CUDA tensors" in said
