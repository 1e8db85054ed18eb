"""What goes on while code of this process holds the GIL for long."""

import ctypes
import os
import select
import threading
from pathlib import Path

import torch
from pool import RankPool

import syncengine

PATIENCE = 60.0  # seconds; it is over as soon as the other rank has what it waits for


class PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def hold_the_gil_until_readable(descriptor: int) -> bool:
    """Returns whether it became readable. No other thread of Python runs meanwhile, as with many a C extension."""
    found = PollFd(descriptor, select.POLLIN, 0)
    return ctypes.PyDLL(None).poll(ctypes.byref(found), 1, int(1000 * PATIENCE)) == 1


def one_thread_waits(folder: str) -> bool:
    """Rank 0 holds the GIL, and one of its threads waits, while rank 1 needs it for a transfer. Whether that ends."""
    held, done = (os.open(Path(folder) / name, os.O_RDWR) for name in ("held", "done"))  # both ways: opens at once
    everyone = syncengine.default_communicator()
    one, other = (everyone.split([0, 1]) for _ in range(2))
    awaited, moved = torch.ones(1), torch.full((1 << 22,), 1.0 + everyone.rank)  # 16 MiB: in many pieces
    if everyone.rank == 1:
        assert select.select([held], [], [], PATIENCE)[0]
        threading.Event().wait(0.5)  # so that the thread of rank 0 that waits wants the GIL by now
        work = other.all_reduce(moved, async_op=True)
        while not work.is_completed():
            threading.Event().wait(0.001)
            if select.select([done], [], [], 0)[0]:  # rank 0 has given up
                break
        else:
            os.write(done, b"!")
        one.all_reduce(awaited)
        work.wait()
        return True
    waiting = threading.Thread(target=one.all_reduce, args=(awaited,))
    waiting.start()
    work = other.all_reduce(moved, async_op=True)
    os.write(held, b"!")
    goes_on = hold_the_gil_until_readable(done)
    if not goes_on:
        os.write(done, b"!")
    waiting.join()
    work.wait()
    assert moved.eq(3.0).all() and awaited.item() == 2.0
    return goes_on


def test_a_waiting_thread_that_wants_the_gil_does_not_keep_others_from_their_transfers(pool: RankPool, tmp_path: Path):
    for name in ("held", "done"):
        os.mkfifo(tmp_path / name)
    assert pool.run(one_thread_waits, str(tmp_path)) == [True, True]
