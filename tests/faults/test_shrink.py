"""Communicator.shrink(): whoever dies, hangs or leaves, and whenever, the others go on together."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import my_rank, suffer
from pool import run_on_ranks

import syncengine
from syncengine.errors import Aborted, InvalidUsage, SyncError


def check_sum(communicator):
    """Every member is there, under its old name."""
    tensor = torch.full((70_000,), 1.0 + my_rank())
    communicator.all_reduce(tensor)
    expected = sum(1.0 + rank for rank in communicator.global_ranks)
    assert torch.equal(tensor, torch.full_like(tensor, expected))
    in_arena = communicator.empty([70_000], torch.float32).fill_(1.0 + my_rank())
    communicator.all_reduce(in_arena)
    assert torch.equal(in_arena, tensor)


@run_on_ranks(world=3, spawned=True, settings=None)
def test_who_has_left_is_not_waited_for():
    def body(step):
        if my_rank() != 1:
            with pytest.raises(SyncError):
                for _ in range(1000):
                    syncengine.barrier()
            began = time.monotonic()
            check_sum(syncengine.shrink(patience=60.0))
            assert time.monotonic() - began < 20

    outcome = suffer(body)
    assert outcome.error == "", outcome


@run_on_ranks(world=3)
def test_shrinking_with_nobody_lost():
    first = syncengine.default_communicator()
    half = first.split([0, 1] if first.rank < 2 else [2])
    second = syncengine.shrink()
    assert second is syncengine.default_communicator() and syncengine.shrink(first) is second
    assert second.global_ranks == [0, 1, 2]
    check_sum(second)
    check_sum(half)  # that of the others is their own
    with pytest.raises(Aborted):
        first.barrier()
    with pytest.raises(InvalidUsage, match="shrunk before"):
        first.shrink()
    third = syncengine.shrink(second)
    check_sum(third)
    assert half.split([half.rank]).shrink(0.1).size == 1
    third.close()  # with all that came of the job's, in whose place it is
    with pytest.raises(InvalidUsage, match="closed"):
        third.shrink()
    with pytest.raises(InvalidUsage, match="closed"):
        half.barrier()


def memory_of_the_dead():
    model = syncengine.Parallel(torch.nn.Linear(3000, 1000))
    for _ in range(2):
        model(torch.ones(1, 3000)).sum().backward()
    if my_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(SyncError):
        while True:
            syncengine.barrier()
    before = shared_bytes()
    model.shrink()
    gc.collect()
    return before - shared_bytes()


def shared_bytes():
    """Of all files in memory that this process maps, as far as their pages are there at all."""
    total = 0
    for entry in Path("/proc/self/map_files").iterdir() if os.geteuid() == 0 else []:
        with contextlib.suppress(OSError):
            if "memfd:syncengine" in str(entry.readlink()):
                total += entry.stat().st_blocks * 512
    return total


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to look at /proc/self/map_files")
def test_memory_of_the_dead_is_given_back(pool):
    with pool.spawn_ranks(memory_of_the_dead, world=2) as ranks:
        assert ranks[0].result() > 8 << 20  # its gradients had 12 MB


def moved_model():
    torch.manual_seed(my_rank())
    model = syncengine.Parallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), audit=1)
    seen = []
    model.module[0].register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(count):
        for _ in range(count):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(4)
    first = model.communicator
    if my_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(SyncError):
        train(1)
    model.shrink()
    assert model.communicator is syncengine.default_communicator() is not first
    model.zero_grad()
    train(3)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybody = torch.empty(weights.numel() * 2)
    syncengine.all_gather(everybody, weights)
    assert torch.equal(everybody[: weights.numel()], everybody[weights.numel() :])
    return len(seen)


def test_a_model_moves(pool):
    with pool.spawn_ranks(moved_model, world=3) as ranks:
        assert [rank.result() for rank in ranks[1:]] == [7, 7]
