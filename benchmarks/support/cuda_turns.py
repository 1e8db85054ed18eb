"""Turns of peers on GPUs, timed by events of each rank's stream: calls of all-reduce, and copies that move as much."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from syncengine._C import Communicator

CHAIN = 100  # calls, or as many as reduce CHAIN_BYTES, but two at least
CHAIN_BYTES = 1 << 30
WARMUP = 2  # turns

Times = dict[str, list[float]]  # a peer's microseconds a call, by turn


def buffer(size: int) -> torch.Tensor:
    """A float32 tensor of `size` bytes on a CUDA device."""
    return torch.empty(max(size // 4, 1), device="cuda")


class Chain:
    """A turn of a peer that averages: a graph of calls one after the other, on one tensor.

    The calls are a graph, since one interpreter needs longer to queue a call for each of eight threads than a device
    needs to make it.
    """

    def __init__(self, average: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        self.average, self.tensor = average, tensor
        self.calls = max(2, min(CHAIN, CHAIN_BYTES // tensor.nbytes))
        self.graph = torch.cuda.CUDAGraph()

    def prepare(self, communicator: Communicator) -> None:
        """Makes the first call, which sets up memory, and the graph. Every rank calls it.

        Capturing begins by waiting for the device, so one rank at a time does it, and no rank has begun its turns.
        """
        self.start(0.0)
        self.average(self.tensor)
        torch.cuda.current_stream().synchronize()
        for turn in range(communicator.size):
            communicator.barrier()
            if turn == communicator.rank:
                stream = torch.cuda.current_stream()
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    for _ in range(self.calls):
                        self.average(self.tensor)
        communicator.barrier()

    def run(self) -> None:
        """Runs the calls of the graph."""
        self.graph.replay()

    def start(self, value: float) -> None:
        """Fills the tensor."""
        self.tensor.fill_(value)

    def is_good(self, average: float) -> bool:
        """Whether the tensor holds this average."""
        return bool(self.tensor.eq(average).all())


class Floor:
    """Copies that read and write as many bytes as a device must for `ranks` ranks' all-reduce of `size` bytes.

    Each of n ranks moves (3 - 1/n) size: it reads its slice of all tensors, writes the sum to its own, and copies the
    slices of the others. Two buffers are copied onto each other.
    """

    def __init__(self, world: int, ranks: int, size: int) -> None:
        moved = ranks * (3 - 1 / world) * size
        self.a, self.b = buffer(int(moved) // 4), buffer(int(moved) // 4)
        self.calls = max(2, min(CHAIN, CHAIN_BYTES // size))

    def run(self) -> None:
        """Runs the copies."""
        for _ in range(self.calls):
            self.b.copy_(self.a)
            self.a.copy_(self.b)

    def start(self, value: float) -> None:
        """Fills the two buffers with different values."""
        self.a.fill_(value)
        self.b.fill_(value + 1)

    def is_good(self, average: float) -> bool:
        """Whether the copies were made. ``average`` does not matter to them."""
        return bool(self.a.eq(self.b).all())


def times(communicator: Communicator, peers: dict[str, Chain | Floor], names: tuple[str, ...], turns: int) -> Times:
    """The times of one rank, with turns of `names` interleaved. Ranks without the floor wait during its turns."""
    for peer in peers.values():
        if isinstance(peer, Chain):
            peer.prepare(communicator)
    found: Times = {name: [] for name in peers}
    for turn in range(turns + WARMUP):
        for name in random.Random(turn).sample(names, len(names)):
            if name in peers:
                peers[name].start(float(communicator.rank + turn))
                torch.cuda.current_stream().synchronize()
            communicator.barrier()
            if name in peers:
                time = timed(peers[name])
                average = sum(range(communicator.size)) / communicator.size + turn
                assert peers[name].is_good(average), f"{name}: a wrong result"
                if turn >= WARMUP:
                    found[name].append(time)
            communicator.barrier()
    return found


def timed(peer: Chain | Floor) -> float:
    """Microseconds of a call, from one turn."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    peer.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / peer.calls
