"""A common start of all ranks for timed calls."""

import mmap
import os
import tempfile

import torch.distributed as dist

LINE = 64  # bytes: each rank's counter on a cache line of its own


class StartLine:
    """Lets all ranks of this host go within about 0.2 us of each other.

    A barrier of Gloo's or MPI's lets ranks go up to 100 us apart, most of a small message's time, and would favor the
    engine that provides it. Here every rank polls the counters of all others in shared memory.
    """

    def __init__(self, rank: int, size: int) -> None:
        path = [None]
        if rank == 0:
            descriptor, path[0] = tempfile.mkstemp(prefix="start-line-")
            os.truncate(descriptor, size * LINE)
            os.close(descriptor)
        dist.broadcast_object_list(path, src=0)
        with open(path[0], "r+b") as file:  # noqa: PTH123
            self._counters = memoryview(mmap.mmap(file.fileno(), size * LINE)).cast("q")
        dist.barrier()
        if rank == 0:
            os.unlink(path[0])  # noqa: PTH108
        self._mine = rank * LINE // 8
        self._others = [other * LINE // 8 for other in range(size) if other != rank]
        self._epoch = 0
        self._crowded = size > len(os.sched_getaffinity(0))

    def wait(self) -> None:
        """Returns when all ranks have called it equally often."""
        self._epoch += 1
        counters, epoch = self._counters, self._epoch
        counters[self._mine] = epoch
        for other in self._others:
            while counters[other] < epoch:
                if self._crowded:
                    os.sched_yield()
