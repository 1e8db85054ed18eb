"""Ctrl-C in each kind of wait: it ends at once with KeyboardInterrupt, and the others raise Aborted naming the rank."""

import contextlib
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import (
    WITHIN,
    Outcome,
    come_last,
    interrupt,
    my_rank,
    needs_hooks,
    set_fault,
    suffer,
    wait_for_file,
    wait_for_waiting,
    wait_until,
)
from faults_model import model_and_step

import syncengine

WAITS = {
    "all_reduce": lambda: syncengine.all_reduce(torch.ones(8)),
    "all_reduce in place": lambda: syncengine.all_reduce(syncengine.empty(3_000_000).fill_(1.0)),
    "barrier": syncengine.barrier,
    "Work.wait": lambda: syncengine.all_reduce(torch.ones(8), async_op=True).wait(),
    "Work.wait with timeout": lambda: syncengine.all_reduce(torch.ones(8), async_op=True).wait(timeout=25.0),
    "split": lambda: syncengine.default_communicator().split([syncengine.rank()]),
}


class Preempted(Exception):
    """What a handler may raise."""


def raise_preempted(*_):
    raise Preempted("two minutes left")


def prepared(kind):
    """The call that waits."""
    if kind in WAITS:
        return WAITS[kind]
    _, train = model_and_step()
    if kind == "second backward":
        train()
    return train


def wait_in(kind, come) -> Outcome:
    """Ranks 0 and 2 wait; rank 1 comes later, to hear what has happened."""

    def body(step):
        signal.signal(signal.SIGTERM, raise_preempted)
        call = prepared(kind)
        syncengine.barrier()
        come_last(come)
        step()
        try:
            call()
        except Preempted as error:
            return str(error)

    return suffer(body, timeout=100.0)


@pytest.mark.parametrize("kind", [*WAITS, "second backward"])
def test_ctrl_c_ends_the_wait(pool, tmp_path, kind):
    interrupt_rank_0(pool, tmp_path / "come", "rank 0 was interrupted (Ctrl-C)", wait_in, kind)


def interrupt_rank_0(pool, come, told, function, *arguments):
    with pool.spawn_ranks(function, *arguments, str(come), world=3, settings=None) as ranks:
        wait_for_waiting(ranks, come, 0, 2)
        interrupted_at = interrupt(ranks[0])
        waiting = ranks[2].result()
        assert waiting.at - interrupted_at < WITHIN
        come.touch()
        for outcome in (waiting, ranks[1].result()):
            outcome.check("Aborted", told)


def init_later(come) -> Outcome:
    come_last(come)
    return suffer(lambda step: syncengine.barrier(), timeout=100.0)


def test_ctrl_c_ends_init(pool, tmp_path):
    interrupt_rank_0(pool, tmp_path / "come", "rank 0 failed in init: KeyboardInterrupt", init_later)


def init_and_meet(fault, connected) -> Outcome:
    set_fault(2, fault)

    def body(step):
        Path(f"{connected}.{my_rank()}").touch()
        syncengine.barrier()

    return suffer(body, timeout=100.0)


@contextlib.contextmanager
def stopped_at(point, pool, tmp_path, function):
    """Rank 2 stops there: at "handed:1" when one of the others has its memory, who then waits in a barrier.

    Gives the ranks, who of the others is not connected, perhaps, and who is.
    """
    with contextlib.ExitStack() as stack:
        for attempt in range(20):
            stack.close()  # ends the ranks of the attempt before
            connected = tmp_path / f"connected{attempt}"
            spawned = pool.spawn_ranks(function, f"{point}:stop", str(connected), world=3, settings=None)
            ranks = stack.enter_context(spawned)
            wait_until("T", ranks[2].pid)
            if point == "listening:1":
                break
            with contextlib.suppress(TimeoutError):  # rank 2 was to prove first who it is, so nobody is connected
                wait_for_file(f"{connected}.0", f"{connected}.1", timeout=5.0)
                break
        else:
            raise TimeoutError("neither rank 0 nor rank 1 was connected in any of 20 attempts")
        for rank in ranks[:2]:  # until they have come as far as they can
            wait_until("S", rank.pid)
        time.sleep(0.3)
        later = 0 if Path(f"{connected}.0").exists() else 1
        yield ranks, 1 - later, later


@needs_hooks
@pytest.mark.parametrize("point", ["listening:1", "handed:1"])
def test_ctrl_c_while_connecting(pool, tmp_path, point):
    with stopped_at(point, pool, tmp_path, init_and_meet) as (ranks, first, later):
        interrupted_at = interrupt(ranks[first])
        told = ranks[later].result()
        assert told.at - interrupted_at < WITHIN
        assert told.left == []
        if told.error == "PeerLost":  # it had not got rank `first`'s memory yet
            assert told.text.startswith((f"rank {first} broke off while", f"rank {first} died while")), told
        else:
            assert (told.error, told.text) == ("Aborted", f"rank {first} was interrupted (Ctrl-C) in init()")


def ctrl_c_in_queued_work(come) -> Outcome:
    """The engine is always busy, so that it never comes to rest before the signal."""

    def body(step):
        tensor = syncengine.empty(30_000_000).fill_(1.0)
        syncengine.barrier()
        works = [syncengine.all_reduce(tensor, async_op=True) for _ in range(1000)]
        step()
        Path(f"{come}.{my_rank()}").touch()
        works[-1].wait()

    return suffer(body, timeout=600.0)


@pytest.mark.thorough
def test_ctrl_c_in_a_long_transfer(pool, tmp_path):
    come = tmp_path / "come"
    with pool.spawn_ranks(ctrl_c_in_queued_work, str(come), world=2, settings=None) as ranks:
        wait_for_file(f"{come}.0")
        time.sleep(0.5)
        interrupt(ranks[0])
        ranks[1].result().check("Aborted")


def shut_down_in_handler(come) -> Outcome:
    """A handler of the user's own, for the scheduler's SIGTERM say, in the middle of a wait."""

    def leave(*_):
        syncengine.shutdown()
        raise SystemExit(0)

    def body(step):
        if my_rank() == 0:
            signal.signal(signal.SIGTERM, leave)
        syncengine.barrier()
        come_last(come)
        step()
        try:
            syncengine.barrier()  # rank 0 has done its part of this one when it leaves
            syncengine.barrier()
        except SystemExit:
            return "left"

    return suffer(body, timeout=100.0)


def told_of_sigterm(pool, come, value, function, *arguments):
    """Rank 0 gets the signal while it waits, and returns `value`; what the others hear of that."""
    with pool.spawn_ranks(function, *arguments, str(come), world=3, settings=None) as ranks:
        wait_for_waiting(ranks, come, 0, 2)
        ranks[0].signal(signal.SIGTERM)
        outcome = ranks[0].result()
        assert (outcome.value, outcome.left) == (value, [])
        come.touch()
        return [rank.result() for rank in ranks[1:]]


def test_a_handler_may_shut_down_and_exit(pool, tmp_path):
    for told in told_of_sigterm(pool, tmp_path / "come", "left", shut_down_in_handler):
        told.check("PeerLost", "rank 0 has left")


@pytest.mark.parametrize("kind", ["all_reduce", "Work.wait", "backward"])
def test_what_a_handler_raises_is_told(pool, tmp_path, kind):
    for told in told_of_sigterm(pool, tmp_path / "come", "two minutes left", wait_in, kind):
        told.check("Aborted")
        assert told.text == "rank 0 failed in a collective: Preempted: two minutes left"


def raise_while_connecting(fault, connected) -> Outcome:
    signal.signal(signal.SIGTERM, raise_preempted)
    try:
        return init_and_meet(fault, connected)
    except Preempted as error:
        return Outcome(error="Preempted", text=str(error))


@needs_hooks
def test_what_a_handler_raises_while_connecting_is_told(pool, tmp_path):
    with stopped_at("handed:1", pool, tmp_path, raise_while_connecting) as (ranks, first, later):
        ranks[first].signal(signal.SIGTERM)
        assert ranks[first].result().text == "two minutes left"
        told = ranks[later].result()
        expected = f"rank {first} failed in init(): Preempted: two minutes left"
        assert (told.error, told.text, told.left) == ("Aborted", expected, [])
