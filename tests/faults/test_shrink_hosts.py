"""Communicator.shrink() over several hosts, which SYNCENGINE_HOST_ID makes: ranks die, whole hosts die, ranks hang."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import Outcome, live_on, my_rank, needs_hooks, set_fault, suffer, wait_for_file, wait_until
from pool import RankFailure
from test_shrink import check_sum, check_survivors, go_on

import syncengine
from syncengine.errors import InvalidUsage, SyncError


def go_on_over(hosts, faults) -> Outcome:
    live_on(hosts)
    return go_on(faults)


# Some 15 operations are opened while the ranks connect.
@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "faults"),
    [
        ("aab", {1: "opened:23:kill"}),
        ("aab", {0: "opened:23:kill"}),
        ("aab", {2: "staged:30:kill"}),
        ("aab", {0: "opened:23:kill", 1: "opened:23:kill"}),
        ("aab", {2: "opened:23:kill", 0: "telling:1:kill"}),
        ("aab", {2: "opened:23:kill", 0: "stated:1:kill"}),
        ("aabb", {0: "pulled:30:kill", 1: "pulled:30:kill"}),
        ("aabb", {2: "opened:23:kill", 3: "arrived:1:kill"}),
        ("aabb", {1: "opened:21:kill", 2: "opened:27:kill"}),
        ("aabb", {3: "opened:23:kill", 0: "arriving:1:kill", 1: "proposed:1:kill"}),
        ("aabb", {3: "opened:23:kill", 2: "telling:2:kill"}),
        ("abab", {0: "opened:23:kill", 2: "stating:1:kill"}),
        ("abc", {1: "opened:23:kill"}),
        ("abc", {0: "opened:23:kill", 1: "opened:23:kill"}),
        ("abc", {2: "opened:23:kill", 0: "stated:1:kill"}),
        ("abc", {1: "opened:23:kill", 0: "telling:2:kill"}),
        ("abc", {1: "opened:23:kill", 0: "telling:4:kill"}),
        ("ab", {0: "opened:23:kill"}),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(f"{rank}.{fault.rpartition(':')[0]}" for rank, fault in value.items())
    ),
)
def test_the_others_go_on(pool, hosts, faults):
    with pool.spawn_ranks(go_on_over, hosts, faults, world=len(hosts), settings=None) as ranks:
        check_survivors(ranks, faults)


def stopped(hosts, who, woken, settings) -> Outcome:
    """Some ranks are stopped within a collective; the others give them up."""
    live_on(hosts)
    for rank in who:
        set_fault(rank, "opened:20:stop")

    def body(step):
        communicator = syncengine.default_communicator()
        tensor = syncengine.empty(1_500_000).fill_(1.0)
        try:
            for _ in range(20):
                communicator.all_reduce(tensor)
        except SyncError:
            step()
            communicator = syncengine.shrink(patience=1.0)
        tensor.fill_(my_rank())
        Path(f"{woken}.{my_rank()}").touch()
        deadline, seen = time.monotonic() + 40, torch.zeros(1)
        while not seen and time.monotonic() < deadline:
            check_sum(communicator)
            time.sleep(0.02)
            seen.fill_(Path(woken).exists())
            communicator.all_reduce(seen, "max")  # all leave together
        assert torch.equal(tensor, torch.full_like(tensor, my_rank())), "a rank that was given up wrote here"
        return communicator.global_ranks

    return suffer(body, **settings)


@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "who", "settings"),
    [
        ("abc", [1], {"timeout": 2.0}),
        ("abc", [0], {"timeout": 2.0}),
        ("aab", [0], {"timeout": 2.0}),
        ("aab", [2], {"timeout": 2.0}),
        ("aabb", [2, 3], {"timeout": 2.0}),
        ("ab", [1], {"timeout": 2.0}),
        ("abc", [2], {"timeout": 60.0, "silence": 1.5}),
        ("aab", [2], {"timeout": 60.0, "silence": 1.5}),
    ],
)
def test_stopped_ranks_are_given_up_and_may_not_go_on(pool, tmp_path, hosts, who, settings):
    woken = tmp_path / "woken"
    left = [rank for rank in range(len(hosts)) if rank not in who]
    with pool.spawn_ranks(stopped, hosts, who, str(woken), settings, world=len(hosts), settings=None) as ranks:
        for rank in who:
            wait_until("T", ranks[rank].pid)
        for rank in left:
            wait_for_file(f"{woken}.{rank}")
        for rank in who:
            ranks[rank].signal(signal.SIGCONT)
        for rank in who:
            outcome = ranks[rank].result()
            assert outcome.error in ("Aborted", "PeerLost"), outcome
            assert "went on without" in outcome.text or "but may live" in outcome.text, outcome
            assert outcome.left == []
        woken.touch()
        for rank in left:
            outcome = ranks[rank].result()
            outcome.check()
            assert outcome.value == left


@needs_hooks
@pytest.mark.parametrize(("hosts", "who"), [("ab", [0]), ("aab", [0, 1]), ("aabb", [0, 1])])
def test_those_who_may_be_the_smaller_part_do_not_go_on(pool, tmp_path, hosts, who):
    """They raise; those who were stopped go on without them."""
    woken = tmp_path / "woken"
    left = [rank for rank in range(len(hosts)) if rank not in who]
    arguments = (hosts, who, str(woken), {"timeout": 2.0})
    with pool.spawn_ranks(stopped, *arguments, world=len(hosts), settings=None) as ranks:
        for rank in who:
            wait_until("T", ranks[rank].pid)
        for rank in left:
            ranks[rank].result().check("PeerLost", "can't be reached, but may live")
        for rank in who:
            ranks[rank].signal(signal.SIGCONT)
        for rank in who:
            wait_for_file(f"{woken}.{rank}")
        woken.touch()
        for rank in who:
            outcome = ranks[rank].result()
            assert (outcome.error, outcome.value) == ("", who), outcome


def settle(communicator):
    """Nobody shrinks it while others are within an earlier call."""
    with contextlib.suppress(SyncError):
        communicator.barrier()


def healthy(hosts):
    live_on(hosts)
    first = syncengine.init(timeout=60.0)
    half = first.split([0, 2] if first.rank in (0, 2) else [1, 3])
    second = first
    for _ in range(3):
        settle(second)
        second = syncengine.shrink()
        assert second.global_ranks == [0, 1, 2, 3]
        assert len(set(syncengine.communicator.hosts())) == 2
        check_sum(second)
        check_sum(half)
    settle(half)
    pair = half.shrink()
    check_sum(pair)
    check_sum(second.split([0, 3] if first.rank in (0, 3) else [1, 2]))
    check_sum(second)
    settle(second)
    for _ in range(60):
        second = second.shrink()
    check_sum(second)
    with pytest.raises(InvalidUsage, match="came of 63 shrinks"):
        second.shrink()
    check_sum(second)


def test_shrinking_with_nobody_lost(pool):
    pool.run(healthy, "aabb", world=4, settings=None)


def killed_again_and_again(hosts) -> Outcome:
    """Each time the first one dies, the others go on, until one is left."""
    live_on(hosts)

    def body(step):
        communicator = syncengine.default_communicator()
        while True:
            try:
                while True:
                    check_sum(communicator)
                    if communicator.rank == 0 and communicator.size > 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if communicator.size == 1:
                        return communicator.global_ranks
            except SyncError:
                communicator = syncengine.shrink()

    return suffer(body, timeout=60.0)


@pytest.mark.parametrize("hosts", ["abcab", "aabbb"])
def test_one_after_the_other(pool, hosts):
    with pool.spawn_ranks(killed_again_and_again, hosts, world=5, settings=None) as ranks:
        outcome = ranks[4].result()
        outcome.check()
        assert outcome.value == [4]
        for rank in ranks[:4]:
            with pytest.raises(RankFailure):
                rank.result()
