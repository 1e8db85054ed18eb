"""Communicator.shrink() on one host and on several, which SYNCENGINE_HOST_ID makes: ranks or hosts die, ranks hang."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import Outcome, my_rank, needs_hooks, set_fault, suffer, wait_for_file, wait_until
from marks import mostly_nightly
from pool import RankFailure, run_on_ranks
from test_shrink import check_sum

import syncengine
from syncengine.errors import InvalidUsage, SyncError

CALLS = 12


def go_on(faults) -> Outcome:
    """Calls in which ranks die by `faults`, a text by rank; each time the others shrink the communicator."""
    for rank, fault in faults.items():
        set_fault(rank, fault)

    def body(step):
        communicator, done = syncengine.default_communicator(), 0
        in_arena = syncengine.empty(300_000)
        while done < CALLS:
            try:
                tensor = torch.ones(100_000)
                communicator.all_reduce(tensor)
                assert torch.equal(tensor, torch.full_like(tensor, communicator.size))
                in_arena.fill_(1.0)
                communicator.all_reduce(in_arena)
                done += 1
            except SyncError:
                communicator = syncengine.shrink(patience=20.0)
                told = torch.tensor([done])
                try:
                    communicator.all_reduce(told, "max")
                except SyncError:  # another one
                    continue
                done = int(told)
        check_sum(communicator)
        assert syncengine.world_size() == communicator.size
        return communicator.global_ranks

    return suffer(body, timeout=100.0)


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
        assert outcome.value == list(outcomes)


# Some 15 operations are opened while hosts connect.
@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "faults"),
    mostly_nightly(
        [
            ("aaaa", {0: "opened:5:kill"}),
            ("aaaa", {2: "reducing:7:kill"}),
            ("aaaa", {1: "reduced:6:kill", 3: "staged:4:kill"}),
            ("aaaa", {0: "pulled:4:kill", 3: "pulled:4:kill"}),
            ("aaaa", {0: "reduced:3:kill", 1: "reduced:9:kill", 2: "reduced:12:kill"}),
            ("aaaa", {2: "opened:5:kill", 0: "arriving:1:kill"}),
            ("aaaa", {2: "opened:5:kill", 0: "arrived:1:kill"}),
            ("aaaa", {2: "opened:5:kill", 1: "proposing:1:kill"}),
            ("aaaa", {2: "opened:5:kill", 1: "proposed:1:kill"}),
            ("aaaa", {0: "opened:5:kill", 1: "arrived:1:kill", 2: "arrived:1:kill"}),
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
        *(2, 5, 7, 8, 9, 12, 13, 14, 15, 19, 21, 26),
    ),
    ids=str,
)
def test_the_others_go_on(pool, hosts, faults):
    with pool.spawn_ranks(go_on, faults, hosts=hosts, settings=None) as ranks:
        check_survivors(ranks, faults)


def stopped(who, fault, woken, settings) -> Outcome:
    """Some ranks are stopped within a collective; the others give them up. They wake when their memory is used."""
    for rank in who:
        set_fault(rank, fault)

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


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize(
    ("hosts", "who", "settings"),
    mostly_nightly(
        [
            ("abc", [1], {"timeout": 2.0}),
            ("abc", [0], {"timeout": 2.0}),
            ("aab", [0], {"timeout": 2.0}),
            ("aab", [2], {"timeout": 2.0}),
            ("aabb", [2, 3], {"timeout": 2.0}),
            ("ab", [1], {"timeout": 2.0}),
            ("abc", [2], {"timeout": 60.0, "silence": 1.5}),
            ("aab", [2], {"timeout": 60.0, "silence": 1.5}),
            ("aaa", [1], {"timeout": 2.0}),
        ],
        2,
    ),
)
def test_stopped_ranks_are_given_up_and_may_not_go_on(pool, tmp_path, hosts, who, settings):
    woken, is_one_host = tmp_path / "woken", len(set(hosts)) == 1
    left = [rank for rank in range(len(hosts)) if rank not in who]
    fault = "reducing:2:stop" if is_one_host else "opened:20:stop"
    with pool.spawn_ranks(stopped, who, fault, str(woken), settings, hosts=hosts, settings=None) as ranks:
        for rank in who:
            wait_until("T", ranks[rank].pid)
        for rank in left:
            wait_for_file(f"{woken}.{rank}")
        for rank in who:
            ranks[rank].signal(signal.SIGCONT)
        for rank in who:
            outcome = ranks[rank].result()
            if is_one_host:
                outcome.check("Aborted", "ranks 0, 2 went on without rank 1")
            assert outcome.error in ("Aborted", "PeerLost"), outcome
            assert "went on without" in outcome.text or "but may live" in outcome.text, outcome
            assert outcome.left == []
        woken.touch()
        for rank in left:
            outcome = ranks[rank].result()
            outcome.check()
            assert outcome.value == left


@pytest.mark.thorough
@needs_hooks
@pytest.mark.parametrize(("hosts", "who"), mostly_nightly([("ab", [0]), ("aab", [0, 1]), ("aabb", [0, 1])], 1))
def test_those_who_may_be_the_smaller_part_do_not_go_on(pool, tmp_path, hosts, who):
    """They raise; those who were stopped go on without them."""
    woken = tmp_path / "woken"
    left = [rank for rank in range(len(hosts)) if rank not in who]
    arguments = (who, "opened:20:stop", str(woken), {"timeout": 2.0})
    with pool.spawn_ranks(stopped, *arguments, hosts=hosts, settings=None) as ranks:
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


@run_on_ranks(hosts=["aabb"])
def test_shrinking_with_nobody_lost():
    first = syncengine.default_communicator()
    half = first.split([0, 2] if first.rank in (0, 2) else [1, 3])
    second = first
    for _ in range(3):
        settle(second)
        second = syncengine.shrink()
        assert second.global_ranks == [0, 1, 2, 3]
        assert len(set(second.hosts)) == 2
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


def killed_again_and_again() -> Outcome:
    """Each time the first one dies, the others go on, until one is left."""

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


@pytest.mark.parametrize("hosts", mostly_nightly(["abcab", "aabbb"], 0))
def test_one_after_the_other(pool, hosts):
    with pool.spawn_ranks(killed_again_and_again, hosts=hosts, settings=None) as ranks:
        outcome = ranks[4].result()
        outcome.check()
        assert outcome.value == [4]
        for rank in ranks[:4]:
            with pytest.raises(RankFailure):
                rank.result()
