"""Memory that the ranks of one host have in common: makes it, and places tensors in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from syncengine._C import CommonMemory, Communicator, MemoryExchange, return_free_memory
from syncengine.errors import InvalidUsage, SyncError
from syncengine.parallel.replication import fail_all
from syncengine.sharded.agreement import agree, gather_json

_ALIGNMENT = 64  # bytes: no two tensors have a cache line in common
_MUCH = 16 << 20  # bytes; to look for what can be returned takes time


class Host:
    """The members of a communicator that share this rank's host."""

    def __init__(self, communicator: Communicator) -> None:
        hosts = communicator.hosts
        self.communicator = communicator
        self.members = [rank for rank, host in enumerate(hosts) if host == hosts[communicator.rank]]
        self.rank, self.size = self.members.index(communicator.rank), len(self.members)

    def name(self, member: int) -> str:
        """The name, in messages, of the ``member``-th rank of this host."""
        return f"rank {self.in_job(member)}"

    def in_job(self, member: int) -> int:
        """The rank in the job of the ``member``-th rank of this host."""
        return self.communicator.global_ranks[self.members[member]]


class Layout(NamedTuple):
    """The sizes, strides and dtype of a tensor without gaps."""

    sizes: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The sizes, strides and dtype of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


def create_common(host: Host, what: str, size: int) -> CommonMemory:
    """Makes memory of ``size`` bytes, all zeros, the same size on all ranks of a host. The ranks of all hosts call it.

    Raises on all ranks if memory is short on one. If ranks can't connect, the communicator has failed.
    """
    communicator, offer, error = host.communicator, None, ""
    try:
        offer = MemoryExchange(size if host.rank == 0 else 0)
    except InvalidUsage as problem:
        error = f"{what}: {problem}"
    agree(communicator, what, b"", list, error, str)
    assert offer is not None
    addresses = gather_json(communicator, offer.address().decode())
    here = [address.encode() if rank in host.members else b"" for rank, address in enumerate(addresses)]
    try:
        return offer.exchange(communicator.rank, here, host.members[0], communicator.timeout, communicator.global_ranks)
    except SyncError as problem:  # other ranks may not have it
        fail_all(communicator, problem)


def size_of(layouts: Iterable[Layout]) -> int:
    """The bytes that tensors of these layouts take in common memory."""
    return sum(-(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT for layout in layouts)


def tensors_in(memory: CommonMemory, layouts: Sequence[Layout], begin: int = 0) -> list[torch.Tensor]:
    """New tensors, each with a storage of its own, one behind the other in ``memory`` from byte ``begin`` on."""
    tensors = []
    for layout in layouts:
        tensors.append(memory.tensor(begin, layout.sizes, layout.strides, layout.dtype))
        begin += size_of([layout])
    return tensors


class FreedMemory:
    """Gives memory of tensors that have moved into common memory back to the system: malloc would keep it."""

    def __init__(self) -> None:
        self._freed = 0

    def add(self, nbytes: int) -> None:
        """Counts ``nbytes`` more as freed. Gives memory back only when it is much, since that takes time."""
        self._freed += nbytes
        if self._freed >= _MUCH:
            self.end()

    def end(self) -> None:
        """Gives the rest of the memory back: nothing more will be freed."""
        self._freed = 0
        return_free_memory()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements of a tensor without gaps, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
