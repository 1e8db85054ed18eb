"""Communicator.shrink(): whoever dies, hangs or leaves, and whenever, the others go on together."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import Outcome, my_rank, needs_hooks, others, set_fault, suffer, wait_for_file, wait_until
from pool import RankFailure, run_on_ranks

import syncengine
from syncengine.errors import Aborted, InvalidUsage, SyncError

CALLS = 12


def check_sum(communicator):
    """Every member is there, under its old name."""
    tensor = torch.full((70_000,), 1.0 + my_rank())
    communicator.all_reduce(tensor)
    expected = sum(1.0 + rank for rank in communicator.global_ranks)
    assert torch.equal(tensor, torch.full_like(tensor, expected))
    in_arena = communicator.empty([70_000], torch.float32).fill_(1.0 + my_rank())
    communicator.all_reduce(in_arena)
    assert torch.equal(in_arena, tensor)


def go_on(faults, patience=20.0) -> Outcome:
    """Calls in which ranks die by `faults`, a text by rank; each time the others shrink the communicator."""
    for rank, fault in faults.items():
        set_fault(rank, fault)

    def body(step):
        communicator, shrinks, seconds = syncengine.default_communicator(), 0, []
        in_arena = syncengine.empty(300_000)
        done = 0
        while done < CALLS:
            try:
                tensor = torch.ones(100_000)
                communicator.all_reduce(tensor)
                assert torch.equal(tensor, torch.full_like(tensor, communicator.size))
                in_arena.fill_(1.0)
                communicator.all_reduce(in_arena)
                done += 1
            except SyncError:
                began = time.monotonic()
                communicator = syncengine.shrink(patience=patience)
                shrinks += 1
                told = torch.tensor([done])
                try:
                    communicator.all_reduce(told, "max")
                except SyncError:  # another one
                    continue
                seconds.append(time.monotonic() - began)
                done = int(told)
        check_sum(communicator)
        assert syncengine.world_size() == communicator.size
        return communicator.global_ranks, shrinks, seconds

    return suffer(body, timeout=30.0)


def check_survivors(ranks, faults):
    """Only the first to see that all are there proposes, or states: whether a rank dies there is left open."""
    outcomes, lost = {}, []
    for number, rank in enumerate(ranks):
        try:
            outcomes[number] = rank.result()
        except RankFailure:
            assert number in faults and rank.exit_code() == -signal.SIGKILL, rank.output()
            lost.append(number)
    assert all(rank in lost for rank in faults if not faults[rank].startswith(("propos", "stat")))
    for outcome in outcomes.values():
        outcome.check()
        assert outcome.value[0] == list(outcomes)


@needs_hooks
@pytest.mark.parametrize(
    "faults",
    [
        {0: "opened:5:kill"},
        {2: "reducing:7:kill"},
        {1: "reduced:6:kill", 3: "staged:4:kill"},
        {0: "pulled:4:kill", 3: "pulled:4:kill"},
        {0: "reduced:3:kill", 1: "reduced:9:kill", 2: "reduced:12:kill"},
        {2: "opened:5:kill", 0: "arriving:1:kill"},
        {2: "opened:5:kill", 0: "arrived:1:kill"},
        {2: "opened:5:kill", 1: "proposing:1:kill"},
        {2: "opened:5:kill", 1: "proposed:1:kill"},
        {0: "opened:5:kill", 1: "arrived:1:kill", 2: "arrived:1:kill"},
    ],
    ids=lambda faults: "-".join(f"{rank}.{fault.rpartition(':')[0]}" for rank, fault in faults.items()),
)
def test_the_others_go_on(pool, faults):
    with pool.spawn_ranks(go_on, faults, world=4, settings=None) as ranks:
        check_survivors(ranks, faults)


def stopped(woken, patience) -> Outcome:
    """Rank 1 is stopped within a collective; the others give it up. It wakes when they use their memory again."""
    set_fault(1, "reducing:2:stop")

    def body(step):
        communicator = syncengine.default_communicator()
        tensor = syncengine.empty(1_500_000).fill_(1.0)
        try:
            for _ in range(3):
                communicator.all_reduce(tensor)
        except SyncError:
            communicator = syncengine.shrink(patience=patience)
        assert my_rank() != 1
        tensor.fill_(my_rank())
        Path(f"{woken}.{my_rank()}").touch()
        for call in range(200):
            check_sum(communicator)
            if call > 50 and Path(woken).exists():
                break
            time.sleep(0.02)
        assert torch.equal(tensor, torch.full_like(tensor, my_rank())), "a rank that was given up wrote here"
        return communicator.global_ranks

    return suffer(body, timeout=2.0)


@needs_hooks
def test_a_stopped_rank_is_given_up_and_may_not_go_on(pool, tmp_path):
    woken = tmp_path / "woken"
    with pool.spawn_ranks(stopped, str(woken), 0.5, world=3, settings=None) as ranks:
        wait_until("T", ranks[1].pid)
        wait_for_file(f"{woken}.0")
        ranks[1].signal(signal.SIGCONT)
        outcome = ranks[1].result()
        woken.touch()
        outcome.check("Aborted", "ranks 0, 2 went on without rank 1")
        for rank in others(ranks, 1):
            outcome = rank.result()
            outcome.check()
            assert outcome.value == [0, 2]


def without_those_that_left() -> Outcome:
    def body(step):
        if my_rank() == 1:
            return None
        try:
            for _ in range(1000):
                syncengine.barrier()
        except SyncError:
            began = time.monotonic()
            check_sum(syncengine.shrink(patience=60.0))
            return time.monotonic() - began

    return suffer(body)


def test_who_has_left_is_not_waited_for(pool):
    with pool.spawn_ranks(without_those_that_left, world=3, settings=None) as ranks:
        outcomes = [rank.result() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["", "", ""], outcomes
    assert max(outcomes[0].value, outcomes[2].value) < 20


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
