"""Collectives on CUDA tensors: streams, graphs, conversions. Skipped where there is no GPU.

`make gpu` runs them with the present torch, without conftest.py and what it needs. What results are is in
test_cuda_conformance.py, what needs no torch in tests/cuda/*_test.cpp.
"""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cuda_ranks import SOFTWARE, TIMEOUT, why_no_gpu
from cuda_training import on_gpus
from faults import WITHIN
from test_cuda_conformance import NUMERICS, same

import syncengine
from syncengine.errors import InvalidUsage, SyncError, Timeout

TURNS = 60 if SOFTWARE else int(os.environ.get("SYNCENGINE_TEST_TURNS", "1000"))


@on_gpus(world=3, in_job=False)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_conversions_have_the_bits_of_the_cpu_engine(rank, numerics):
    """Every bit pattern, scaled."""
    communicator = syncengine.init(numerics=numerics, timeout=TIMEOUT)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        on_cpu = patterns.view(dtype).clone() if rank == 0 else torch.zeros(65536, dtype=dtype)
        on_gpu = on_cpu.cuda()
        communicator.all_reduce(on_cpu, "avg")
        communicator.all_reduce(on_gpu, "avg")
        assert same(on_gpu.cpu(), on_cpu), dtype
    syncengine.shutdown()


@on_gpus()
@pytest.mark.parametrize("world", [2, 4])
def test_streams_and_delays(rank, world):
    """Delays that differ by rank, asynchronous calls, tensors with gaps, another stream."""
    communicator = syncengine.default_communicator()
    other = torch.cuda.Stream()
    for step in range(20):
        torch.cuda._sleep(int(1e6) * ((rank + step) % 3))
        tensor = torch.full((4096, 3), float(rank + step), device="cuda")
        work = communicator.all_reduce(tensor[:, ::2], async_op=True)
        second = torch.full((5000,), float(rank), device="cuda")
        communicator.all_reduce(second, "max")
        work.wait()
        total = float(sum(peer + step for peer in range(world)))
        assert tensor[:, ::2].eq(total).all() and tensor[:, 1].eq(float(rank + step)).all()
        assert second.eq(float(world - 1)).all()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            third = torch.full((100_000,), 1.0, device="cuda")
            communicator.all_reduce(third)
            assert third.eq(float(world)).all()
        torch.cuda.current_stream().wait_stream(other)


@on_gpus()
def test_barriers_and_works_hold_up_streams_and_not_the_host(rank):
    """Rank 1 makes each call when rank 0 has seen that its own, and what is queued behind it, wait on the device."""
    communicator = syncengine.default_communicator()
    tensor = torch.full((100_000,), rank + 1.0, device="cuda")
    own, other = torch.cuda.current_stream(), torch.cuda.Stream()
    communicator.barrier(device=tensor.device)  # connects
    own.synchronize()
    with torch.cuda.stream(other):
        doubled = tensor * 2  # loads the kernel: later that may wait for a stream that waits for the peer

    if rank == 1:
        dist.barrier()
    communicator.barrier(device=tensor.device)
    if rank == 0:
        assert not own.query(), "the stream does not wait"
        dist.barrier()
    own.synchronize()

    if rank == 1:
        dist.barrier()
    work = communicator.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(other):
        work.wait()
        doubled = tensor * 2
    if rank == 0:
        assert not work.is_completed() and work.exception() is None
        assert not other.query(), "the stream that was current does not wait"
        own.synchronize()  # and no other one
        dist.barrier()
    work.wait(timeout=TIMEOUT)
    assert work.is_completed() and work.exception() is None
    assert tensor.eq(3.0).all()
    other.synchronize()
    assert doubled.eq(6.0).all()


@on_gpus()
def test_a_limit_that_has_passed_is_everyones_error(rank):
    communicator = syncengine.default_communicator()
    tensor = torch.ones(100_000, device="cuda")
    communicator.barrier(device=tensor.device)  # connects
    if rank == 0:
        work = communicator.all_reduce(tensor, async_op=True)
        for wait in (partial(work.wait, timeout=0.1), work.wait):
            with pytest.raises(Timeout, match=r"Work.wait\(timeout\): a CUDA collective has not ended in time"):
                wait()
        assert isinstance(work.exception(), Timeout)
        deadline = time.monotonic() + WITHIN
        while not work.is_completed():
            assert time.monotonic() < deadline, "the stream waits for the peer"
            time.sleep(0.01)
        assert tensor.isnan().all()
    dist.barrier()
    with pytest.raises(SyncError, match=r"Work.wait\(timeout\)"):
        communicator.all_reduce(tensor)


@on_gpus()
def test_memory_that_is_dropped_at_once_is_kept_for_the_communicators_stream(rank):
    """Nobody holds tensor or work, while that stream still waits for a late rank."""
    communicator = syncengine.default_communicator()
    communicator.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.current_stream().synchronize()
    if rank == 1:
        torch.cuda._sleep(int(1e8))
    communicator.all_reduce(torch.ones(1000, device="cuda"), async_op=True)
    tensor = torch.full((100_000,), float(rank + 1), device="cuda")
    work = communicator.all_reduce(tensor, async_op=True)
    if rank == 0:
        del tensor, work
        others = [torch.full((100_000,), 100.0, device="cuda") for _ in range(4)]
        assert all(other.eq(100.0).all() for other in others)
    else:
        work.wait()
        assert tensor.eq(3.0).all()


@on_gpus()
@pytest.mark.parametrize("world", [2, 3])
def test_graphs_replay_between_eager_calls(rank, world):
    """A step of three collectives, captured; eager calls before, between and after; one rank replays late."""
    communicator = syncengine.default_communicator()
    direct = communicator.empty([1 << 16], torch.float32, torch.device("cuda"))
    staged = torch.empty(40_000, device="cuda")
    small = torch.empty(16, device="cuda")
    source = torch.empty(1 << 16, device="cuda")
    tensors = (direct, staged, small)
    sums = [torch.zeros_like(tensor) for tensor in tensors]

    def step():
        direct.copy_(source)
        staged.copy_(source[:40_000])
        small.copy_(source[:16])
        for tensor in tensors:
            communicator.all_reduce(tensor)

    source.fill_(1.0)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(TURNS):
        source.fill_(float(turn % 100 + rank))
        if turn % world == rank:
            torch.cuda._sleep(int(1e5))
        if turn % 10 == 9:
            step()
        else:
            graph.replay()
        for total, tensor in zip(sums, tensors, strict=True):
            total.add_(tensor)
        if turn % 50 == 9:
            torch.cuda.current_stream().synchronize()
    wanted = sum(turn % 100 + peer for turn in range(TURNS) for peer in range(world))
    assert all(total.eq(float(wanted)).all() for total in sums)


@on_gpus(world=3)
def test_groups_of_some_ranks(rank):
    half = syncengine.default_communicator().split([0, 1] if rank < 2 else [])
    if half is not None:
        tensor = torch.full((1000,), float(rank + 1), device="cuda")
        half.all_reduce(tensor)
        assert tensor.eq(3.0).all()


# ---- without a GPU ----


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_asking_for_cuda_says_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    syncengine.init()
    try:
        with pytest.raises(InvalidUsage, match="no CUDA side|no driver|no device"):
            syncengine.empty(3, device="cuda")
    finally:
        syncengine.shutdown()
