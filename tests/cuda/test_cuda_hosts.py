"""CUDA tensors between hosts, which SYNCENGINE_HOST_ID makes: bits, training, streams, graphs, groups, faults.

Two ways lead there: "relayed", through pinned memory and the CPU's engine; "fabric", from device to device by NCCL.
Skipped where there is no GPU, or, for NCCL, none for each rank; `make gpu` runs them. On the device in software, what
is called nccl is a backend with its manners over Gloo (tests/cuda/torch/nccl.h).
"""

from __future__ import annotations

import functools
import logging
import os
import time
from itertools import product
from typing import Any

import pytest
import test_cuda_parallel
import torch
import torch.distributed as dist
from cuda_ranks import alone, marked, needs_a_gpu_each, run_processes
from cuda_training import batch, job
from parallel_models import Mlp
from test_cuda_conformance import NUMERICS, conformance, same, values
from test_cuda_equality import Run, differ
from test_cuda_parallel import averages_on_streams, check_average, exact_average, host_runs_ahead
from test_cuda_parallel_faults import suffers

import syncengine
from syncengine.errors import SyncError

both_ways = pytest.mark.parametrize("way", ["relayed", "fabric"])


def live_on(hosts: str, rank: int) -> None:
    os.environ["SYNCENGINE_HOST_ID"] = hosts[rank]


def run(way: str, hosts: str, body: Any, environ: dict[str, str] | None = None, **options: Any) -> list[Any]:
    """body(rank) on a rank for each letter; equal letters share a host."""
    environ = {"HOSTS": hosts, "WAY": way, **(environ or {})}
    if way == "fabric":
        needs_a_gpu_each(len(hosts))
        environ["SYNCENGINE_INTERHOST"] = "torch"
    return run_processes(len(hosts), body, environ=environ, **options)


def begin(rank: int) -> None:
    """Before syncengine.init()."""
    live_on(os.environ["HOSTS"], rank)
    if os.environ["WAY"] == "fabric":
        dist.init_process_group("cpu:gloo,cuda:nccl")


def went_its_way(communicator: syncengine.Communicator) -> str:
    counters = communicator.counters()
    ways = [way for way in ("relayed", "fabric") if counters.get(f"cuda_{way}_bytes", 0) > 0]
    return "good" if ways == [os.environ["WAY"]] else str(counters)


# ---- bits ----


def gives_the_cpus_bits(rank: int) -> str:
    begin(rank)
    communicator = syncengine.init(numerics=os.environ["NUMERICS"], timeout=60.0)
    conformance(communicator, "hosts", most=40)
    outcome = went_its_way(communicator)
    syncengine.shutdown()
    return outcome


@marked
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("way", "hosts"), [*product(["relayed"], ["ab", "aab", "abcab"]), *product(["fabric"], ["ab", "aab", "abba"])]
)
def test_gpu_and_cpu_ranks_give_the_same_bits(way: str, hosts: str, numerics: str):
    assert run(way, hosts, gives_the_cpus_bits, {"NUMERICS": numerics}) == ["good"] * len(hosts)


def adds_by_hosts(rank: int) -> str:
    """Each host's sum, rounded, then these: the words of docs/numerics.md."""
    begin(rank)
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
    outcome = went_its_way(communicator)
    syncengine.shutdown()
    return outcome


@marked
@pytest.mark.parametrize("hosts", ["ab", "aabb", "abba"])
def test_fast_adds_the_sums_of_hosts(hosts: str):
    assert run("fabric", hosts, adds_by_hosts) == ["good"] * len(hosts)


def takes_several_pieces(rank: int) -> str:
    """More bytes than are staged at once; several calls are queued without a wait, and each rank is late in turn."""
    begin(rank)
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
    assert run("fabric", "aab", takes_several_pieces) == ["good"] * 3


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
        return differ(RUNS) or [went_its_way(syncengine.init())]


@both_ways
@marked
def test_two_hosts_train_bit_equal_to_ddp(way: str):
    assert run(way, "ab", trains_as_ddp) == [["good"], ["good"]]


def two_models(rank: int) -> str:
    """Once their plans are made, a common backward comes by them in another order on each rank."""
    begin(rank)
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
    assert run("fabric", "ab", two_models) == ["good"] * 2


def on_streams(rank: int) -> str:
    begin(rank)
    return averages_on_streams(rank)


def runs_ahead(rank: int) -> str:
    begin(rank)
    return host_runs_ahead(rank)


def replays(rank: int) -> str:
    begin(rank)
    return test_cuda_parallel.replays(rank, warm_up_aside=True)


@marked
@pytest.mark.parametrize(
    ("way", "hosts", "body"),
    [
        ("relayed", "ab", on_streams),
        ("fabric", "ab", on_streams),
        ("fabric", "ab", runs_ahead),
        ("relayed", "aab", replays),
        ("fabric", "aab", replays),
    ],
)
def test_streams_and_graphs(way: str, hosts: str, body: Any):
    assert run(way, hosts, body) == ["good"] * len(hosts)


# ---- groups ----


def in_groups(rank: int) -> str:
    """Some of the ranks: by split(), by Parallel over a process group, by the backend "syncengine"."""
    begin(rank)
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
        outcome = went_its_way(part)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    syncengine.shutdown()
    return outcome


@marked
def test_groups_of_some_ranks():
    assert run("fabric", "aab", in_groups) == ["good"] * 3


def outlives_the_programs_groups(rank: int) -> str:
    begin(rank)
    for _ in range(2):
        communicator = syncengine.init(timeout=60.0)
        tensor = torch.ones(1000, device="cuda")
        communicator.all_reduce(tensor)
        if _ == 1:
            dist.destroy_process_group()
        communicator.all_reduce(tensor)
        assert tensor.eq(4.0).all()
        assert went_its_way(communicator) == "good"
        syncengine.shutdown()
    return "good"


@marked
def test_the_program_destroys_its_groups_first():
    assert run("fabric", "ab", outlives_the_programs_groups) == ["good"] * 2


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
    taken = run("fabric", "ab", takes_the_way_it_logs, {"BACKEND": backend})
    assert taken == [[way, f"INFO: {line}"], [way, f"DEBUG: {line}"]]


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
    said = run("fabric", "ab", nccl_alone)
    assert all("has 'nccl' alone: initialize it with 'cpu:gloo,cuda:nccl'" in text for text in said), said
    assert any(text.startswith("InvalidUsage") for text in said), said


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
    assert run("relayed", "ab", as_backend) == ["good"] * 2


# ---- faults ----

FAULTS = [  # of rank 1: its kind, whether it ends the process, and the survivor's error
    ("killed", 1, "PeerLost", "rank 1"),
    ("forward", None, "Aborted", "rank 1 raised in forward: ZeroDivisionError"),
]


def suffers_here(rank: int, kind: str) -> Any:
    begin(rank)
    return suffers(rank, kind)


@both_ways
@alone
@marked
@pytest.mark.parametrize(("kind", "killed", "error", "text"), FAULTS)
def test_a_failing_rank(way: str, kind: str, killed: int | None, error: str, text: str):
    name, said, is_nan = run(way, "ab", functools.partial(suffers_here, kind=kind), killed=killed)[0]
    assert name == error and text in said
    assert is_nan, "trained on gradients that were not reduced"


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


@both_ways
@marked
@pytest.mark.parametrize(("counts", "ops"), [((1000, 2000), ("sum", "sum")), ((1000, 1000), ("sum", "max"))])
def test_ranks_that_call_something_else(way: str, counts: tuple[int, int], ops: tuple[str, str]):
    for is_nan, said in run(way, "ab", functools.partial(differs, counts=counts, ops=ops)):
        assert is_nan
        assert said.startswith("Mismatch: rank "), said
        assert "on CUDA tensors" in said
        assert {"relayed": "all ranks must make the same calls", "fabric": "something else"}[way] in said


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
    is_nan, said = run("relayed", "ab", leaves)[0]
    assert is_nan
    assert said.startswith("PeerLost: ") and "rank 1 has left" in said


def comes_too_late(rank: int) -> tuple[bool, str]:
    begin(rank)
    communicator = syncengine.init(timeout=10.0)
    communicator.barrier(device=torch.device("cuda"))
    torch.cuda.synchronize()
    if rank == 1:
        dist.recv(torch.empty(1), 0)
        return True, ""
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    outcome = outcome_of(communicator, tensor)
    dist.send(torch.zeros(1), 1)
    return outcome


@marked
def test_a_rank_that_does_not_come():
    is_nan, said = run("fabric", "ab", comes_too_late)[0]
    assert is_nan
    assert said.startswith("Timeout: rank 0 waits for other ranks since "), said
    assert "all_reduce(sum, float32, 1000 elements) on CUDA tensors" in said
