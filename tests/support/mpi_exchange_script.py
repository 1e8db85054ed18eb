"""What goes wrong while ranks meet through MPI, and the script of all launchers. See test_launchers_real.py.

    mpi_exchange_script.py told stale

Runs these cases one after the other in one job, since each job takes seconds to start; for each one every rank prints
a line of JSON: how it ended.
"""

import json
import os
import sys
import time

import launched_script

import syncengine
from syncengine.errors import SyncError
from syncengine.launch import mpi

WORLD = mpi.load("the test", "install it").COMM_WORLD
RANK = WORLD.Get_rank()
TIMEOUT = 1.0


def exchange(timeout: float = 20.0) -> mpi.MPIExchange:
    return mpi.MPIExchange(RANK, 2, timeout, log_after=60.0)


def ended(call) -> str:
    try:
        return repr(call())
    except SyncError as error:
        return f"{type(error).__name__}: {error}"


def wait_for_begin_of(after: int) -> None:
    """Until the other rank waits in the exchange which is so many after this rank's next."""
    address, _ = mpi._tags("init", mpi._opened["init"] + after)
    deadline = time.monotonic() + 20
    while not WORLD.Iprobe(tag=address) and time.monotonic() < deadline:
        time.sleep(0.01)


def init_again() -> list[str]:
    """Rank 1 fails in its first init(); what the ranks told each other then must not reach the second."""
    first = ended(lambda: syncengine.init(timeout=20, arena_bytes=4096 if RANK == 1 else None))
    WORLD.Barrier()  # else rank 0 may find that rank 1 waits anew
    second = ended(lambda: syncengine.init(timeout=20).size)
    syncengine.shutdown()
    return [first, second]


def told() -> list[str]:
    """Rank 1 can't come, and says so to one that waits already, or does not wait yet."""
    answers = []
    for late in (0, 1):
        own = exchange()
        time.sleep(0.3 if late == RANK else 0.0)
        if RANK == 1:
            own.fail(ValueError("the disk is full"))
            answers.append("told")
        else:
            answers.append(ended(lambda: own(b"hello")))  # noqa: B023
        WORLD.Barrier()
    return answers


def stale() -> list[str]:
    """Both fail for reasons of their own, with addresses under way, and then meet."""
    own = exchange(TIMEOUT)
    if RANK == 0:
        first = ended(lambda: own(b"old"))  # rank 1 does not come
        own.fail(ValueError("rank 0 gave up"))
        WORLD.Barrier()
    else:
        first = "away"
        WORLD.Barrier()
        own.fail(ValueError("rank 1 was away"))
    return [first, ended(lambda: exchange()(f"new {RANK}".encode()))]


def untaken() -> list[str]:
    """Rank 1 sends its address but takes rank 0's, which is too large to be sent without it, too late."""
    own = exchange(TIMEOUT)
    if RANK == 1:
        own._comm.Send([b"hello", own._mpi.BYTE], dest=0, tag=own._tag)
        WORLD.Barrier()
        own._comm.Recv([bytearray(mpi.MAX_PAYLOAD), own._mpi.BYTE], source=0, tag=own._tag)
        return ["took it"]
    answer = ended(lambda: own(b"x" * mpi.MAX_PAYLOAD))
    WORLD.Barrier()
    return [answer]


def ahead() -> list[str]:
    """Rank 0 begins the next exchange; rank 1 can see that without taking part."""
    own = exchange()
    own(b"first")
    if RANK == 1:
        deadline = time.monotonic() + 20
        while not own.superseded() and time.monotonic() < deadline:
            time.sleep(0.01)
    saw = str(own.superseded())
    return [saw if RANK == 1 else "ahead", ended(lambda: exchange()(f"new {RANK}".encode()))]


def anew() -> list[str]:
    """The communicator fails, and both connect again, three times."""
    answers = []
    for _ in range(3):
        communicator = syncengine.init(timeout=20)
        if RANK == 0:
            communicator.abort("a bad day")
        answers.append(ended(communicator.barrier))
    syncengine.shutdown()
    return answers


def late() -> list[str]:
    """Rank 1 comes when rank 0 has failed in three exchanges, and waits in the fourth: it hears of each."""
    answers = []
    if RANK == 0:
        for reason in ("the first", "the second"):
            exchange().fail(ValueError(reason))
        own = exchange(TIMEOUT)
        ended(lambda: own(b"old"))
        own.fail(ValueError("the third"))
    else:
        wait_for_begin_of(3)
        answers = [ended(lambda: exchange()(b"late")) for _ in range(3)]
    return answers + [ended(lambda: exchange()(f"{word} {RANK}".encode())) for word in ("next", "last")]  # noqa: B023


def jobs() -> list[str]:
    """Each rank prints what launched_script.py has it print; the last one's communicator is left to the end."""
    for when in ("never", "group", "group"):  # where nothing but the engine knows a store
        syncengine.shutdown()
        launched_script.main(when)
    return []


CASES = {case.__name__: case for case in (init_again, told, stale, untaken, ahead, anew, late, jobs)}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        WORLD.Barrier()  # cases count on a common beginning
        answer = {"rank": RANK, "case": name, "answers": CASES[name]()}
        os.write(1, json.dumps(answer).encode() + b"\n")
