"""Collectives on CUDA tensors: bits of the CPU engine, streams, graphs, faults. Skipped where there is no GPU.

`make gpu` runs them with the present torch, without conftest.py and what it needs.
"""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from cuda_ranks import SOFTWARE, alone, marked, run_processes, run_threads, why_no_gpu

import syncengine
from syncengine.errors import InvalidUsage, SyncError

LARGE = 300_000 if SOFTWARE else 5_000_000  # that device is slow, and tests/cuda looks at large tensors there
SIZES = [0, 1, 3, 1000, 100_003, LARGE]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


def values(rank, size, dtype, seed=0):
    """The same on CPU and GPU: subnormals, infinities and NaN among the floating ones."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (size,), generator=generator).to(dtype)
    exponents = torch.randint(-30, 15, (size,), generator=generator).float()
    tensor = (torch.randn(size, generator=generator) * exponents.exp2()).to(dtype)
    if size > 1000:
        tensor[rank * 7] = float("inf")
        tensor[500] = float("nan") if rank == 1 else 1.0
    return tensor


def reduced(world, size, dtype, op, seed=0):
    """In rank order; 16-bit floats in float32. An oracle that shares nothing with the engine."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = values(0, size, dtype, seed).to(wide)
    for rank in range(1, world):
        part = values(rank, size, dtype, seed).to(wide)
        total = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)(total, part)
    if op == "avg":
        total = total * (1.0 / world)
    return total.to(dtype)


def same(a, b):
    return torch.equal(a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5)) and torch.equal(a.isnan(), b.isnan())


def all_reduce_everything(rank, communicator, world, algorithm):
    for dtype in FLOATS + INTEGERS:
        for op in ["sum", "product", "min", "max"] + (["avg"] if dtype.is_floating_point else []):
            for size in SIZES if op in ("sum", "avg") else SIZES[:4]:
                if algorithm == "direct":
                    tensor = communicator.empty([size], dtype, torch.device("cuda"))
                else:
                    tensor = torch.empty(size, dtype=dtype, device="cuda")
                tensor.copy_(values(rank, size, dtype))
                communicator.all_reduce(tensor, op)
                assert same(tensor.cpu(), reduced(world, size, dtype, op)), (dtype, op, size)


@marked
@pytest.mark.parametrize("algorithm", ["auto", "staged", "one_shot", "direct"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_all_reduce_has_the_bits_of_the_oracle(world, algorithm):
    run_threads(world, lambda rank, c: all_reduce_everything(rank, c, world, algorithm), algorithm=algorithm)


def every_half(rank, communicator):
    """Every bit pattern, scaled: the device's conversions against the CPU engine's."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        on_cpu = patterns.view(dtype).clone() if rank == 0 else torch.zeros(65536, dtype=dtype)
        on_gpu = on_cpu.cuda()
        communicator.all_reduce(on_cpu, "avg")
        communicator.all_reduce(on_gpu, "avg")
        assert same(on_gpu.cpu(), on_cpu), dtype


@marked
@pytest.mark.parametrize("numerics", ["rank_order", "ring"])
def test_conversions_have_the_bits_of_the_cpu_engine(numerics):
    run_threads(3, every_half, numerics=numerics)


def compare_with_cpu(rank, communicator):
    for seed, size in enumerate([1, 4095, 300_000, LARGE + 1]):
        for dtype in (torch.float32, torch.bfloat16):
            on_cpu = values(rank, size, dtype, seed)
            on_gpu = on_cpu.cuda()
            communicator.all_reduce(on_cpu, "avg")
            communicator.all_reduce(on_gpu, "avg")
            assert same(on_gpu.cpu(), on_cpu), (size, dtype)


@marked
@pytest.mark.parametrize("numerics", ["rank_order", "ring"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_gpu_and_cpu_ranks_give_the_same_bits(world, numerics):
    run_threads(world, compare_with_cpu, numerics=numerics)


def other_collectives(rank, communicator):
    world = communicator.size
    for size in SIZES:
        for memory in ("any", "empty"):

            def make(count, memory=memory):
                if memory == "empty":
                    return communicator.empty([count], torch.float32, torch.device("cuda"))
                return torch.empty(count, device="cuda")

            tensor = make(size).copy_(values(rank, size, torch.float32))
            communicator.broadcast(tensor, world - 1)
            assert same(tensor.cpu(), values(world - 1, size, torch.float32))

            part = make(size).copy_(values(rank, size, torch.float32))
            whole = make(size * world)
            communicator.all_gather(whole, part)
            expected = torch.cat([values(peer, size, torch.float32) for peer in range(world)])
            assert same(whole.cpu(), expected)

            scattered = make(size)
            whole.copy_(values(rank, size * world, torch.float32))
            communicator.reduce_scatter(scattered, whole)
            expected = reduced(world, size * world, torch.float32, "sum")[rank * size : (rank + 1) * size]
            assert same(scattered.cpu(), expected)
    communicator.barrier(device=torch.device("cuda"))


@marked
@pytest.mark.parametrize("world", [2, 3, 8])
def test_other_collectives(world):
    run_threads(world, other_collectives)


def late_and_in_turns(rank, communicator):
    """Delays that differ by rank, asynchronous calls, tensors with gaps, another stream."""
    other = torch.cuda.Stream()
    for step in range(20):
        torch.cuda._sleep(int(1e6) * ((rank + step) % 3))
        tensor = torch.full((4096, 3), float(rank + step), device="cuda")
        work = communicator.all_reduce(tensor[:, ::2], async_op=True)
        second = torch.full((5000,), float(rank), device="cuda")
        communicator.all_reduce(second, "max")
        work.wait()
        total = float(sum(peer + step for peer in range(communicator.size)))
        assert tensor[:, ::2].eq(total).all() and tensor[:, 1].eq(float(rank + step)).all()
        assert second.eq(float(communicator.size - 1)).all()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            third = torch.full((100_000,), 1.0, device="cuda")
            communicator.all_reduce(third)
            assert third.eq(float(communicator.size)).all()
        torch.cuda.current_stream().wait_stream(other)


@marked
@pytest.mark.parametrize("world", [2, 4])
def test_streams_and_delays(world):
    run_threads(world, late_and_in_turns)


def dropped_at_once(rank, communicator):
    """Nobody holds tensor or work, while the communicator's stream still waits for a late rank."""
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


@marked
def test_memory_that_is_dropped_at_once_is_kept_for_the_communicators_stream():
    run_threads(2, dropped_at_once)


capturing = threading.Lock()


def captured(communicator, step):
    """Capturing begins by waiting for the device: one rank at a time, and none has begun with what comes after."""
    torch.cuda.current_stream().synchronize()
    communicator.barrier()
    graph = torch.cuda.CUDAGraph()
    with capturing, torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        step()
    communicator.barrier()
    return graph


def replays(rank, communicator, rounds):
    """A step of three collectives, captured; eager calls before, between and after; one rank replays late."""
    direct = communicator.empty([1 << 18], torch.float32, torch.device("cuda"))
    staged = torch.empty(3000, device="cuda")
    small = torch.empty(16, device="cuda")
    source = torch.empty(1 << 18, device="cuda")

    def step():
        direct.copy_(source)
        staged.copy_(source[:3000])
        small.copy_(source[:16])
        for tensor in (direct, staged, small):
            communicator.all_reduce(tensor)

    source.fill_(1.0)
    step()
    graph = captured(communicator, step)
    for turn in range(rounds):
        source.fill_(float(turn % 100 + rank))
        if turn % communicator.size == rank:
            torch.cuda._sleep(int(1e5))
        if turn % 10 == 9:
            step()
        else:
            graph.replay()
        if turn % 50 == 9 or turn > rounds - 10:
            total = sum(turn % 100 + peer for peer in range(communicator.size))
            assert all(tensor.eq(float(total)).all() for tensor in (direct, staged, small)), turn


@marked
@pytest.mark.parametrize("world", [2, 3])
def test_graphs_replay_between_eager_calls(world):
    run_threads(world, lambda rank, c: replays(rank, c, 1000))


def mismatched(rank, communicator):
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    if rank == 0:
        communicator.all_reduce(tensor, "max")
    else:
        communicator.all_reduce(tensor, "min")
    torch.cuda.current_stream().synchronize()
    assert tensor.isnan().all()
    deadline = time.monotonic() + 5
    with pytest.raises(SyncError, match="rank [01] called all_reduce.*rank [01] called all_reduce") as found:
        while time.monotonic() < deadline:
            communicator.all_reduce(tensor)
            time.sleep(0.01)
    for call in ("rank 0 called all_reduce.* max", "rank 1 called all_reduce.* min"):  # whoever finds it comes first
        assert re.search(call, str(found.value))


@marked
def test_mismatch_names_both_sides_and_leaves_nan():
    run_threads(2, mismatched)


def memory_of_a_job(rank, communicator):
    for _ in range(5):
        communicator.all_reduce(communicator.empty([1 << 22], torch.float32, torch.device("cuda")).zero_())


@alone
@marked
def test_memory_is_given_back():
    run_threads(2, memory_of_a_job)  # loads kernels, which stay
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        run_threads(2, memory_of_a_job)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - (8 << 20)


# ---- processes ----


def train_on_bits(rank):
    communicator = syncengine.init(timeout=60)
    compare_with_cpu(rank, communicator)
    other_collectives(rank, communicator)
    half = communicator.split([0, 1] if rank < 2 else [])
    if half is not None:
        tensor = torch.full((1000,), float(rank + 1), device="cuda")
        half.all_reduce(tensor)
        assert tensor.eq(3.0).all()
    syncengine.shutdown()
    return "good"


@marked
@pytest.mark.parametrize("world", [2, 3])
def test_processes_on_however_many_gpus(world):
    assert run_processes(world, train_on_bits) == ["good"] * world


def against_gloo(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    communicator = syncengine.init(timeout=60)
    for size in (1, 1000, 1_000_003):
        tensor = values(rank, size, torch.float32)
        expected = tensor.clone()
        dist.all_reduce(expected)
        mine = tensor.cuda()
        communicator.all_reduce(mine)
        assert same(mine.cpu(), expected)
    syncengine.shutdown()
    dist.destroy_process_group()
    return "good"


@marked
def test_two_ranks_have_the_bits_of_gloo():
    assert run_processes(2, against_gloo) == ["good"] * 2


def killed_in_between(rank):
    communicator = syncengine.init(timeout=timedelta(seconds=60))
    tensor = torch.ones(1 << 20, device="cuda")
    communicator.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        communicator.all_reduce(tensor)  # an error, if the death is known already
        torch.cuda.synchronize()  # no stream waits for ever
        assert tensor.isnan().all(), "unreduced, and looks like a result"
        while time.monotonic() < begin + 5:
            communicator.all_reduce(tensor)
            time.sleep(0.01)
    except SyncError as error:
        return f"{type(error).__name__} after {time.monotonic() - begin:.2f} s: {error}"
    return "no error"


@marked
def test_a_killed_rank_ends_the_wait():
    survivor, _ = run_processes(2, killed_in_between, killed=1)
    assert survivor.startswith("PeerLost after 0."), survivor
    assert "rank 1" in survivor


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
