"""Turns of peers on GPUs, timed by events of each rank's stream: calls of all-reduce, and copies that move as much."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from syncengine._C import Communicator

GRAPH_BYTES = 1 << 20  # up to here calls are chained in a graph
CHAIN = 100
WARMUP = 2  # turns

Times = dict[str, list[float]]  # a peer's microseconds a call, by turn


def buffer(size: int) -> torch.Tensor:
    """float32, of `size` bytes, of a CUDA device."""
    return torch.empty(max(size // 4, 1), device="cuda")


class Chain:
    """A turn of a peer that averages: calls one after the other, on one tensor."""

    def __init__(self, average: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        self.average, self.tensor = average, tensor
        self.chained = tensor.nbytes <= GRAPH_BYTES
        self.calls = CHAIN if self.chained else max(1, min(20, (1 << 30) // tensor.nbytes))
        self.run: Callable[[], None] = self.eager

    def eager(self) -> None:
        """The calls as they are."""
        for _ in range(self.calls):
            self.average(self.tensor)

    def prepare(self, communicator: Communicator) -> None:
        """On every rank: what is set up by the first call, and a graph of small ones.

        Capturing begins by waiting for the device: one rank at a time, and none has begun with what comes after.
        """
        self.start(0.0)
        self.average(self.tensor)
        torch.cuda.current_stream().synchronize()
        if not self.chained:
            return
        graph = torch.cuda.CUDAGraph()
        for turn in range(communicator.size):
            communicator.barrier()
            if turn == communicator.rank:
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                    self.eager()
        communicator.barrier()
        self.run = graph.replay

    def start(self, value: float) -> None:
        """Fills the tensor."""
        self.tensor.fill_(value)

    def is_good(self, average: float) -> bool:
        """Whether a turn gave this."""
        return bool(self.tensor.eq(average).all())


class Floor:
    """Copies of one half of `size` bytes onto the other and back: as reading and writing each byte once moves."""

    def __init__(self, size: int) -> None:
        self.a, self.b = buffer(size // 2), buffer(size // 2)
        self.calls = max(1, min(100, (1 << 30) // size))

    def run(self) -> None:
        """The copies."""
        for _ in range(self.calls):
            self.b.copy_(self.a)
            self.a.copy_(self.b)

    def start(self, value: float) -> None:
        """Fills the halves, not alike."""
        self.a.fill_(value)
        self.b.fill_(value + 1)

    def is_good(self, average: float) -> bool:
        """Whether copies were made; ``average`` is not theirs."""
        return bool(self.a.eq(self.b).all())


def times(communicator: Communicator, peers: dict[str, Chain | Floor], names: tuple[str, ...], turns: int) -> Times:
    """One rank's, turns of `names` interleaved. Ranks have the same chains; those without the floor wait meanwhile."""
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
    """Microseconds a call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    peer.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / peer.calls
