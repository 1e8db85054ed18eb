"""A rank is killed at each state of the protocol: every other rank raises PeerLost naming it, at once."""

import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from faults import (
    WITHIN,
    Outcome,
    check_killed,
    my_rank,
    needs_hooks,
    set_fault,
    suffer,
    wait_for_file,
    wait_for_waiting,
)
from marks import mostly_nightly

import syncengine

POINTS = ["opened", "staged", "reducing", "reduced", "pulled", "finished"]


def asynchronous():
    tensors = [torch.ones(100_000) for _ in range(6)]

    def call():
        works = [syncengine.all_reduce(tensor, async_op=True) for tensor in tensors]
        time.sleep(0.005)  # the engine's thread is at it
        for work in works:
            work.wait()

    return call


def all_gather():
    part = torch.ones(100_000)
    whole = torch.empty(100_000 * syncengine.world_size())
    return partial(syncengine.all_gather, whole, part)


def reduce_scatter():
    part = syncengine.empty(100_000)
    whole = syncengine.empty(100_000 * syncengine.world_size()).fill_(1.0)
    return partial(syncengine.reduce_scatter, part, whole)


# Each prepares its tensors, and returns a call without arguments.
CALLS = {
    "ordinary": lambda: partial(syncengine.all_reduce, torch.ones(400_000)),
    "arena": lambda: partial(syncengine.all_reduce, syncengine.empty(1_500_000).fill_(1.0)),
    "small": lambda: partial(syncengine.all_reduce, torch.ones(8)),
    "asynchronous": asynchronous,
    "broadcast": lambda: partial(syncengine.broadcast, syncengine.empty(300_000).fill_(1.0), 0),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "barrier": lambda: syncengine.barrier,
}
REDUCING = ("ordinary", "arena", "small", "asynchronous", "reduce_scatter")


def call_again_and_again(fault, name, *victims) -> Outcome:
    for victim in victims:
        set_fault(victim, fault)

    def body(step):
        call = CALLS[name]()
        for _ in range(100):
            step()
            call()

    return suffer(body, timeout=100.0)


CASES = [(name, point) for name in CALLS for point in POINTS if point != "reducing" or name in REDUCING]
# All states of one call, and of each other call some in which it goes its own way.
IN_CI = [
    *(("ordinary", point) for point in POINTS),
    ("arena", "reducing"),
    ("arena", "pulled"),
    ("small", "reducing"),
    ("small", "finished"),
    ("asynchronous", "reduced"),
    ("broadcast", "staged"),
    ("broadcast", "pulled"),
    ("all_gather", "staged"),
    ("reduce_scatter", "reducing"),
    ("barrier", "opened"),
]


@needs_hooks
@pytest.mark.parametrize(("name", "point"), mostly_nightly(CASES, *map(CASES.index, IN_CI)))
def test_killed_in_a_collective(pool, name, point):
    number = POINTS.index(point)
    victim, (action, code) = number % 3, [("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV)][number % 2]
    with pool.spawn_ranks(call_again_and_again, f"{point}:3:{action}", name, victim, world=3, settings=None) as ranks:
        check_killed(ranks, victim, code)


@needs_hooks
@pytest.mark.parametrize("point", mostly_nightly(POINTS, 2, 4))
@pytest.mark.parametrize(
    ("world", "victim", "name"), mostly_nightly([(2, 0, "ordinary"), (2, 1, "arena"), (8, 5, "arena")], 1, 2)
)
def test_killed_among_few_and_many(pool, world, victim, name, point):
    fault = f"{point}:2:kill"
    with pool.spawn_ranks(call_again_and_again, fault, name, victim, world=world, settings=None) as ranks:
        check_killed(ranks, victim)


@needs_hooks
def test_os_exit_in_a_collective(pool):
    with pool.spawn_ranks(call_again_and_again, "reducing:2:exit", "arena", 1, world=3, settings=None) as ranks:
        check_killed(ranks, 1, code=3)


def meet(step):
    """Who had the dead rank's memory already believes in a communicator until it uses it."""
    step()
    syncengine.barrier()


def init_only(victim, fault) -> Outcome:
    set_fault(victim, fault)
    return suffer(meet, timeout=100.0)


CONNECTING = ["listening:1", "connecting:1", "handed:1", "joining:1"]


@needs_hooks
@pytest.mark.parametrize(
    ("world", "point"),
    [
        *((3, point) for point in [*CONNECTING, "handed:2"]),
        *mostly_nightly([(2, point) for point in CONNECTING] + [(8, point) for point in [*CONNECTING, "handed:2"]]),
    ],
)
def test_killed_while_connecting(pool, world, point):
    victim = world - 1
    with pool.spawn_ranks(init_only, victim, f"{point}:kill", world=world, settings=None) as ranks:
        check_killed(ranks, victim)


def out_of_address_space(victim) -> Outcome:
    """The victim can map its own arena but not the others'; those have its memory already."""
    arena_bytes = 4 << 30
    if my_rank() == victim:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + arena_bytes * 3 // 2
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return suffer(meet, timeout=20.0, arena_bytes=arena_bytes)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_can_not_map_the_others_memory(pool, world):
    victim = world - 1
    with pool.spawn_ranks(out_of_address_space, victim, world=world, settings=None) as ranks:
        outcomes = [rank.result() for rank in ranks]
    mine = outcomes.pop(victim)
    mine.check("InvalidUsage", "can't map 4294967296 bytes of shared memory", "SYNCENGINE_ARENA_BYTES")
    for outcome in outcomes:
        outcome.check("Aborted", soon=True)
        assert outcome.text == f"rank {victim} failed in init: InvalidUsage: {mine.text}"


@needs_hooks
def test_two_killed_at_once(pool):
    with pool.spawn_ranks(call_again_and_again, "reduced:5:kill", "ordinary", 1, 3, world=4, settings=None) as ranks:
        for survivor in (ranks[0], ranks[2]):
            outcome = survivor.result()
            outcome.check("PeerLost")
            assert "rank 1 died" in outcome.text or "rank 3 died" in outcome.text


def wait_for_the_dead(come) -> Outcome:
    def body(step):
        syncengine.barrier()
        Path(f"{come}.{my_rank()}").touch()
        if my_rank() == 1:
            time.sleep(60)
        step()
        syncengine.all_reduce(torch.ones(8))

    return suffer(body, timeout=100.0)


def test_killed_while_computing(pool, tmp_path):
    """Measured from the kill on: the others sleep in the kernel by then."""
    come = tmp_path / "come"
    with pool.spawn_ranks(wait_for_the_dead, str(come), world=3, settings=None) as ranks:
        wait_for_waiting(ranks, come, 0, 1, 2)
        killed_at = time.monotonic()
        ranks[1].signal(signal.SIGKILL)
        for survivor in (ranks[0], ranks[2]):
            outcome = survivor.result()
            outcome.check("PeerLost", "rank 1 died while rank", "all_reduce(sum, float32, 8 elements)")
            assert 0 < outcome.at - killed_at < WITHIN


def use_pair(victim, past) -> Outcome:
    def body(step):
        world = syncengine.default_communicator()
        pair = world.split([0, 1] if world.rank < 2 else [2])
        syncengine.barrier()
        Path(f"{past}.{world.rank}").touch()
        if world.rank == victim:
            for rank in range(world.size):
                wait_for_file(f"{past}.{rank}")
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        with pytest.raises(syncengine.errors.PeerLost, match="rank 2 died"):
            syncengine.barrier()
        # The pair has lost nobody.
        total = torch.ones(1000)
        for _ in range(5):
            pair.all_reduce(total)
        return total[0].item()

    return suffer(body, timeout=100.0)


def test_a_communicator_without_the_dead_goes_on(pool, tmp_path):
    with pool.spawn_ranks(use_pair, 2, str(tmp_path / "past"), world=3, settings=None) as ranks:
        for survivor in ranks[:2]:
            assert survivor.result().value == 32.0
