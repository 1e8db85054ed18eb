"""A rank is stopped past the deadline and then woken: the others have raised Timeout, and their memory is theirs."""

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from faults import (
    WITHIN,
    Outcome,
    my_rank,
    needs_hooks,
    seconds_after,
    set_fault,
    suffer,
    wait_for_failure,
    wait_for_file,
    wait_until,
)
from marks import mostly_nightly
from pool import run_on_ranks

import syncengine

TIMEOUT = 2.0  # init() keeps it, too, while as many as 15 processes start
COUNT = 1_500_000


def stopped_in_a_collective(victim, fault, in_arena, woken) -> Outcome:
    """The victim returns as soon as it is told; the others stay until it has, and compare their tensor with before."""
    set_fault(victim, fault)

    def body(step):
        tensor = syncengine.empty(COUNT) if in_arena else torch.empty(COUNT)
        bystander = syncengine.empty(COUNT).fill_(7.0)
        tensor.fill_(my_rank() + 1.0)
        try:
            for _ in range(3):
                step()
                syncengine.all_reduce(tensor)
        finally:
            if my_rank() != victim:
                before, bystander_before = tensor.clone(), bystander.clone()
                Path(f"{woken}.{my_rank()}").touch()
                wait_for_file(woken)
                assert torch.equal(tensor, before), "a woken rank wrote into this one's tensor"
                assert torch.equal(bystander, bystander_before)
                tensor.fill_(0.0)  # still mine to use

    return suffer(body, timeout=TIMEOUT)


POINTS = [("reducing:2", True), ("reduced:2", True), ("staged:2", True), ("reducing:3", False), ("pulled:2", False)]


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize(
    ("world", "points"), mostly_nightly([(2, POINTS), (3, POINTS), *((8, [point]) for point in POINTS)], 1)
)
def test_woken_rank_changes_nobodys_memory(pool, tmp_path, world, points):
    """Small jobs come to their deadlines side by side."""
    victim = 1
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, (point, in_arena) in enumerate(points):
            woken = tmp_path / f"woken {number}"
            arguments = (victim, f"{point}:stop", in_arena, str(woken))
            ranks = pool.spawn_ranks(stopped_in_a_collective, *arguments, world=world, settings=None)
            jobs[woken] = stack.enter_context(ranks)
        for woken, ranks in jobs.items():
            wake(ranks, victim, woken)


def wake(ranks, victim, woken):
    survivors = [number for number in range(len(ranks)) if number != victim]
    for number in survivors:
        wait_for_file(f"{woken}.{number}")
    ranks[victim].signal(signal.SIGCONT)
    ranks[victim].result().check("Timeout", f"waits for rank {victim} ")  # its peers' words
    woken.touch()
    for number in survivors:  # they name no other rank
        ranks[number].result().check(
            "Timeout", f"waits for rank {victim} ", "all_reduce(sum, float32, 1500000 elements)"
        )


def stopped_while_computing(woken) -> Outcome:
    def body(step):
        syncengine.barrier()
        if my_rank() == 1:
            Path(f"{woken}.1").touch()
            wait_for_file(woken)  # stopped meanwhile
        step()
        syncengine.barrier()

    return suffer(body, timeout=TIMEOUT)


@pytest.mark.thorough
def test_stopped_while_computing(pool, tmp_path):
    woken = tmp_path / "woken"
    with pool.spawn_ranks(stopped_while_computing, str(woken), world=3, settings=None) as ranks:
        wait_for_file(f"{woken}.1")
        ranks[1].signal(signal.SIGSTOP)
        for survivor in (ranks[0], ranks[2]):
            outcome = survivor.result()
            outcome.check("Timeout")
            assert seconds_after("waits for rank 1 since", outcome.text) >= TIMEOUT
        ranks[1].signal(signal.SIGCONT)
        woken.touch()
        ranks[1].result().check("Timeout")


CALLS = {
    "barrier": lambda tensor: syncengine.barrier(),
    "all_reduce": syncengine.all_reduce,
    "all_gather": lambda tensor: gather(tensor),
    "broadcast": lambda tensor: syncengine.broadcast(tensor, 0),
}


def gather(tensor: torch.Tensor) -> None:
    syncengine.all_gather(whole := torch.empty(2 * len(tensor)), tensor)
    assert whole.unique().tolist() == [1.0, 2.0]


def stopped_before_a_failure(name, count, in_arena, fault, failed) -> None:
    """Rank 0 ends the call, and then the communicator; rank 1, which has done its part, finds both at once."""
    set_fault(1, fault)
    syncengine.init(timeout=20.0)
    tensor = syncengine.empty(count) if in_arena else torch.empty(count)
    CALLS[name](tensor.fill_(syncengine.rank() + 1.0))
    if syncengine.rank() == 0:
        syncengine.default_communicator().abort("a bad day")
        Path(failed).touch()
    with pytest.raises(syncengine.errors.Aborted, match="a bad day"):
        syncengine.barrier()
    assert tensor.unique().tolist() == {"all_reduce": [3.0], "broadcast": [1.0]}.get(name, [syncengine.rank() + 1.0])


@needs_hooks
@pytest.mark.parametrize(
    ("name", "count", "in_arena", "fault"),
    mostly_nightly(
        [
            ("barrier", 1, False, "reduced:1:stop"),
            ("all_reduce", 8, False, "staged:1:stop"),
            ("all_reduce", 1000, False, "reduced:1:stop"),
            ("all_reduce", 100_000, True, "pulled:1:stop"),
            ("all_gather", 1000, False, "reduced:1:stop"),
            ("broadcast", 1000, False, "staged:1:stop"),
        ],
        2,
        3,
        5,
    ),
)
def test_what_the_others_ended_before_they_failed_ends_here_too(pool, tmp_path, name, count, in_arena, fault):
    failed = tmp_path / "failed"
    arguments = (name, count, in_arena, fault, str(failed))
    with pool.spawn_ranks(stopped_before_a_failure, *arguments, settings=None) as ranks:
        wait_for_file(failed)
        wait_until("T", ranks[1].pid)
        ranks[1].signal(signal.SIGCONT)
        for rank in ranks:
            rank.result()


def stopped_before_an_end(name, end, asleep) -> str:
    """Rank 0 ends while rank 1 has looked what there is to do, and not yet who is still there."""
    set_fault(1, "looking:3:stop")
    syncengine.init(timeout=20.0)
    tensor = torch.full((8,), syncengine.rank() + 1.0)
    if syncengine.rank() == 0:
        wait_for_file(asleep)
    CALLS[name](tensor)
    if syncengine.rank() == 0:
        if end == "dies":
            os._exit(3)
        syncengine.default_communicator().abort("a bad day")
    assert tensor.unique().tolist() == ([3.0] if name == "all_reduce" else [1.0])
    with pytest.raises(syncengine.errors.SyncError) as error:
        syncengine.barrier()
    return str(error.value)


@needs_hooks
@pytest.mark.parametrize(
    ("name", "end"), mostly_nightly(itertools.product(["all_reduce", "broadcast"], ["dies", "fails"]), 0, 3)
)
def test_what_one_ended_before_its_own_end_is_seen_before_that(pool, tmp_path, name, end):
    asleep = tmp_path / "asleep"
    with pool.spawn_ranks(stopped_before_an_end, name, end, str(asleep), settings=None) as ranks:
        wait_until("T", ranks[1].pid)
        asleep.touch()
        if end == "dies":
            assert ranks[0].exit_code() == 3
        else:
            ranks[0].result()
        ranks[1].signal(signal.SIGCONT)
        assert ranks[1].result().startswith("rank 0 died" if end == "dies" else "a bad day")


def stopped_for_a_moment() -> Outcome:
    def body(step):
        tensor = syncengine.empty(COUNT).fill_(1.0)
        deadline = time.monotonic() + 2.0
        while True:
            syncengine.all_reduce(tensor.fill_(1.0))
            assert tensor[0] == tensor[-1] == syncengine.world_size()
            done = torch.tensor([time.monotonic() > deadline])
            syncengine.broadcast(done, 0)
            if done:
                return

    return suffer(body, timeout=100.0)


@pytest.mark.thorough
def test_stopped_for_a_moment_is_no_error(pool):
    with pool.spawn_ranks(stopped_for_a_moment, world=2, settings=None) as ranks:
        for _ in range(3):
            time.sleep(0.3)
            ranks[1].signal(signal.SIGSTOP)
            time.sleep(0.3)
            ranks[1].signal(signal.SIGCONT)
        for rank in ranks:
            rank.result().check()


@run_on_ranks(world=3, settings=None)
def test_work_wait_gives_up():
    def body(step):
        if my_rank() == 0:
            work = syncengine.all_reduce(torch.ones(8), async_op=True)
            step()
            work.wait(timeout=0.5)
        else:
            wait_for_failure()
            step()
            syncengine.all_reduce(torch.ones(8))

    outcome = suffer(body, timeout=100.0)
    outcome.check("Timeout", "s in all_reduce(")
    assert 0.5 <= seconds_after("^rank 0 waits for ranks 1, 2 since", outcome.text) < WITHIN


@pytest.mark.thorough
@needs_hooks
@run_on_ranks(spawned=True, settings=None)
def test_work_that_ends_as_wait_gives_up_is_no_error():
    """Another thread brings the operation to its end while the one that waited is about to give it up."""
    set_fault(0, "giving up:1:sleep2500")  # from 0.5 s to 3 s, if the other one comes in time

    def body(step):
        tensor = torch.ones(8)
        if my_rank() == 0:
            work = syncengine.all_reduce(tensor, async_op=True)
            other = threading.Thread(target=work.wait)
            other.start()
            step()
            work.wait(timeout=0.5)
            other.join()
        else:
            time.sleep(1.0)
            step()
            syncengine.all_reduce(tensor)
        syncengine.barrier()
        return tensor[0].item()

    outcome = suffer(body, timeout=100.0)
    outcome.check()
    assert outcome.value == 2.0
