"""GPU ranks as threads of one process, each with a stream of its own: for measuring collectives on one GPU.

Processes would take turns on it. A call that waits for the whole device (torch.cuda.synchronize, freeing memory,
loading a kernel) would wait for other ranks' streams, which may wait for this rank. So bodies synchronize their stream,
or make such calls where no rank can be ahead, between barriers; and torch's kernels are loaded before bodies begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: else ranks' streams may share a queue

import torch

from syncengine._C import Communicator, LocalBootstrap, solo
from syncengine.config import Config

TIMEOUT = 60.0


def load_kernels() -> None:
    """Loads the kernels of torch that bodies may use: fill_, copy_, eq and all."""
    a, b = (torch.empty(64, device="cuda") for _ in range(2))
    b.copy_(a.fill_(1.0))
    assert a.eq(1.0).all() and bool(b.eq(a).all())


def run_threads(world: int, body: Callable[[int, Communicator], object]) -> list[object]:
    """Runs body(rank, communicator) on `world` threads, on one device; returns the results by rank.

    A body that raises fails the others' communicator, as a process that ends would.
    """
    options = Config.read({}).options(TIMEOUT)
    options.arena_bytes = options.arena_bytes or 256 << 20
    addresses: list[bytes] = [b""] * world
    ready = Barrier(world)
    load_kernels()

    def connect(rank: int) -> Communicator:
        bootstrap = LocalBootstrap(rank, world, options)
        addresses[rank] = bootstrap.address()
        ready.wait(TIMEOUT)
        return bootstrap.connect(addresses, TIMEOUT)

    def run(rank: int) -> object:
        communicator = solo(options) if world == 1 else connect(rank)
        torch.cuda.set_device(0)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                result = body(rank, communicator)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            communicator.abort(f"rank {rank}: {error}")
            raise
        finally:
            communicator.close()
        return result

    with ThreadPoolExecutor(world) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(world)]]
