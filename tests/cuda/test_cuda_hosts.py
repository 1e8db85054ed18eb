"""CUDA tensors between hosts, which SYNCENGINE_HOST_ID makes: bits of the CPU engine and DDP, streams, graphs, faults.

Skipped where there is no GPU; `make gpu` runs them. What needs none of it is in tests/cuda/hosts_test.cpp.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import alone, marked, run_processes
from cuda_training import batch, graph_step, job
from models.workload import same_bits
from parallel_models import CAP, Mlp
from test_cuda_conformance import NUMERICS, conformance
from test_cuda_equality import Run, differ
from test_cuda_parallel import averages_on_streams
from test_cuda_parallel_faults import suffers

import syncengine


def live_on(hosts: str, rank: int) -> None:
    os.environ["SYNCENGINE_HOST_ID"] = hosts[rank]


def run(hosts: str, body: Any, **options: Any) -> list[Any]:
    """body(rank) on a rank for each letter; equal letters share a host."""
    return run_processes(len(hosts), body, environ={"HOSTS": hosts}, **options)


def reaches_the_cpu_engine(rank: int, numerics: str) -> str:
    live_on(os.environ["HOSTS"], rank)
    communicator = syncengine.init(numerics=numerics, timeout=60.0)
    conformance(communicator, "hosts", most=40)
    counters = communicator.counters()
    syncengine.shutdown()
    return "good" if counters["cuda_relayed_bytes"] > 0 else str(counters)


@marked
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_gpu_and_cpu_ranks_give_the_same_bits(hosts: str, numerics: str):
    body = functools.partial(reaches_the_cpu_engine, numerics=numerics)
    assert run(hosts, body) == ["good"] * len(hosts)


RUNS = [
    Run(),
    Run(dtype=torch.bfloat16, accumulate=2),
    Run(autocast=torch.float16),
    Run(options=(("find_unused_parameters", True),)),
]


def trains_as_ddp(rank: int) -> list[str]:
    live_on("ab", rank)
    with job():
        return differ(RUNS)


@marked
def test_two_hosts_train_bit_equal_to_ddp_over_gloo():
    assert run("ab", trains_as_ddp) == [[], []]


def on_streams(rank: int) -> str:
    live_on("ab", rank)
    return averages_on_streams(rank)


@marked
def test_averages_on_streams_that_are_not_the_default_one():
    assert run("ab", on_streams) == ["good"] * 2


def replays(rank: int) -> str:
    live_on("aab", rank)
    with job():
        trained = []
        for captured in (True, False):
            torch.manual_seed(3)
            model = syncengine.Parallel(Mlp().cuda(), **CAP)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.empty(6, 24, device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for step in range(4):
                    x.copy_(batch(step))
                    graph_step(model, optimizer, x)
                graph = torch.cuda.CUDAGraph()
                if captured:
                    with torch.cuda.graph(graph, stream=stream):
                        graph_step(model, optimizer, x)
                for turn in range(100):
                    x.copy_(batch(turn % 7))
                    graph.replay() if captured and turn % 10 else graph_step(model, optimizer, x)
                stream.synchronize()
            trained.append([p.detach().cpu() for p in model.parameters()])
        assert all(map(same_bits, *trained))
    return "good"


@marked
def test_a_captured_step_equals_eager_ones():
    assert run("aab", replays) == ["good"] * 3


FAULTS = [  # of rank 1: its kind, whether it ends the process, and the survivor's error
    ("killed", 1, "PeerLost", "rank 1"),
    ("forward", None, "Aborted", "rank 1 raised in forward: ZeroDivisionError"),
]


def check_survivor(outcome: Any, error: str, text: str) -> None:
    """What `suffers` returned on rank 0."""
    name, said, took, is_nan = outcome
    assert name == error and text in said
    assert is_nan, "trained on gradients that were not reduced"
    assert took < 3.5  # a step, and the next call


def suffers_here(rank: int, kind: str) -> Any:
    live_on("ab", rank)
    return suffers(kind)


@alone
@marked
@pytest.mark.parametrize(("kind", "killed", "error", "text"), FAULTS)
def test_a_failing_rank(kind: str, killed: int | None, error: str, text: str):
    check_survivor(run("ab", functools.partial(suffers_here, kind=kind), killed=killed)[0], error, text)


def as_backend(rank: int) -> str:
    live_on("ab", rank)
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
