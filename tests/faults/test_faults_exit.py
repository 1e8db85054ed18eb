"""How a rank ends: by an uncaught exception, early, without cleaning up. Those who wait for it hear of it."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from faults import Outcome, ended, my_rank, needs_hooks, others, set_fault, suffer
from marks import mostly_nightly

import syncengine


def end_and_wait(how) -> Outcome:
    """Rank 1 ends its process in the way `how`; the others wait for it."""
    if my_rank() != 1:
        return suffer(wait_for_rank_1, timeout=100.0)
    syncengine.init(timeout=30.0)
    syncengine.barrier()
    time.sleep(0.3)
    if how == "raise":
        raise ValueError("batch 7 is not a number: \u00e9\u4e2d")
    if how == "interrupt":
        raise KeyboardInterrupt("the disk is full")
    if how == "sys.exit":
        sys.exit(5)
    if how == "os._exit":
        os._exit(6)
    assert how == "return"
    return None


def wait_for_rank_1(step):
    syncengine.barrier()
    step()
    syncengine.all_reduce(torch.ones(100))


ENDS = {
    "raise": (1, "Aborted", "rank 1: ValueError: batch 7 is not a number: \u00e9\u4e2d"),
    "interrupt": (-signal.SIGINT, "Aborted", "rank 1: KeyboardInterrupt: the disk is full"),
    "sys.exit": (5, "PeerLost", "rank 1 has left (it exited or called syncengine.shutdown())"),
    "return": (0, "PeerLost", "rank 1 has left (it exited or called syncengine.shutdown())"),
    "os._exit": (6, "PeerLost", "rank 1 died"),
}


@pytest.mark.parametrize("how", mostly_nightly(ENDS, 0, 2))
def test_the_others_hear_of_an_end(pool, how):
    code, error, text = ENDS[how]
    with pool.spawn_ranks(end_and_wait, how, world=3, settings=None) as ranks:
        for waiting in (ranks[0], ranks[2]):
            waiting.result().check(error, text, soon=True)
        assert ranks[1].exit_code() == code, ranks[1].output()
        assert error != "Aborted" or text.removeprefix("rank 1: ") in ranks[1].output()


def last_of_all() -> Outcome:
    """Rank 0 has done its part of the broadcast and ends; the other one still reads."""

    def body(step):
        tensor = torch.ones(100_000) * (1 + my_rank())
        if my_rank() != 0:
            time.sleep(0.5)
        syncengine.broadcast(tensor, 0)
        return tensor.sum().item()

    return suffer(body, timeout=100.0)


def test_a_normal_end_is_no_error_for_those_who_do_not_wait(pool):
    for outcome, _ in ended(pool, last_of_all, settings=None):
        outcome.check()
        assert outcome.value == 100_000.0


def last_of_a_split() -> float:
    """As above, in a group that nobody closes, and without shutdown()."""
    pair = syncengine.default_communicator().split([0, 1])
    tensor = torch.ones(1000) * (1 + my_rank())
    if my_rank() == 1:
        time.sleep(1.0)
    pair.broadcast(tensor, 0)
    return tensor.sum().item()


@pytest.mark.thorough
def test_splits_end_with_the_job(pool):
    assert [value for value, _ in ended(pool, last_of_a_split)] == [1000.0] * 2


def end_without_shutdown() -> str:
    """Communicators, works and arena tensors that live until the interpreter ends, or longer."""
    world = syncengine.default_communicator()
    sys.modules["kept_for_ever"] = [world, world.split([0, 1]), syncengine.empty(1000)]
    tensor = syncengine.empty(1000).fill_(1.0)
    sys.modules["kept_for_ever"].append(syncengine.all_reduce(tensor, async_op=True))
    syncengine.barrier()
    return "ended"


def test_the_interpreter_ends_quietly(pool):
    assert ended(pool, end_without_shutdown) == [("ended", "")] * 2


def leave_a_thread_waiting() -> str:
    pair = syncengine.default_communicator().split([0, 1])
    if my_rank() == 1:
        threading.Thread(target=pair.barrier, daemon=True).start()
        time.sleep(0.3)
    return "left"


def test_a_daemon_thread_that_waits_does_not_hold_up_the_end(pool):
    assert [said for said, _ in ended(pool, leave_a_thread_waiting)] == ["left"] * 2


def report_then_exit() -> Outcome:
    """The one who notices first exits at once: the others must still hear who died, not who left."""
    if my_rank() == 2:
        syncengine.init(timeout=30.0)
        syncengine.barrier()
        os._exit(9)

    def body(step):
        syncengine.barrier()
        if my_rank() == 1:
            time.sleep(1.0)
        step()
        syncengine.barrier()

    return suffer(body, timeout=100.0)


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([3, 8], 0))
def test_everybody_names_the_dead_not_each_other(pool, world):
    with pool.spawn_ranks(report_then_exit, world=world, settings=None) as ranks:
        for rank in others(ranks, 2):
            outcome = rank.result()
            outcome.check("PeerLost")
            assert outcome.text.startswith("rank 2 died"), outcome


class EndsSlowly:
    """The interpreter's end takes a while: nobody gets Python's lock any more."""

    def __del__(self) -> None:
        time.sleep(2.0)


def end_while_the_engine_drops_a_tensor() -> str:
    """What a rank's engine drops last belongs to Python: it asks for Python's lock, which the end never lets go of."""
    set_fault(0, "dropping:1:sleep500")
    atexit._clear()
    hold_the_lock = ctypes.PyDLL(None).usleep
    atexit.register(hold_the_lock, 1_000_000)  # before init(): so it comes last
    sys.modules["kept_for_ever"] = syncengine.init(timeout=30.0)
    if my_rank() == 1:
        time.sleep(0.3)  # so that the engine's thread of rank 0 ends it
        syncengine.all_reduce(torch.ones(1000))
        return "ended"
    tensor = torch.ones(1000)
    storage = tensor.untyped_storage()
    work = syncengine.all_reduce(tensor, async_op=True)
    del tensor, storage
    while not work.is_completed():
        time.sleep(0.001)
    return "ended"


def end_in_a_callback() -> str:
    """A future's callback runs while the main thread ends, and nobody destroys the group."""

    def callback(future: torch.futures.Future) -> None:
        time.sleep(0.5)
        print("called back", flush=True)

    dist.init_process_group("syncengine")
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, async_op=True).get_future().then(callback)
    dist.barrier()
    sys.modules[__name__].kept = EndsSlowly()
    return "ended"


@pytest.mark.thorough
@needs_hooks
def test_the_interpreter_waits_for_what_the_engine_drops(pool):
    # That Python is disturbed by _clear() stands in what they write.
    assert [said for said, _ in ended(pool, end_while_the_engine_drops_a_tensor, settings=None)] == ["ended"] * 2


@pytest.mark.thorough
def test_the_interpreter_waits_for_callbacks(pool):
    assert ended(pool, end_in_a_callback, settings=None) == [("ended", "called back\n")] * 2


def forked_rank(rank: int, store: str) -> None:
    """Rank 2 is done soon. The others need each other."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3")
    dist.init_process_group("syncengine", store=dist.FileStore(store), rank=rank, world_size=3)
    dist.barrier()

    for _ in range(3 if rank < 2 else 0):
        time.sleep(0.3)
        dist.send(torch.zeros(4), 1) if rank == 0 else dist.recv(torch.zeros(4), 0)


def fork_ranks(store: str) -> list[int | None]:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=forked_rank, args=(rank, store)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    return [process.exitcode for process in processes]


@pytest.mark.thorough
def test_ranks_that_multiprocessing_forks_leave_as_others_do(pool, tmp_path):
    store = str(tmp_path / "store")
    assert ended(pool, fork_ranks, store, world=1, settings=None) == [([0, 0, 0], "")]
