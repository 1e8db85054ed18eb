"""The stream of the collectives that a script calls, and what a rank that has joined does for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from syncengine._C import Backend, Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.reductions import engine_op
from syncengine.horovod.requests import dtype_named
from syncengine.horovod.streams import Round, Stream

_REDUCED = ("allreduce", "grouped_allreduce", "backward of SyncBatchNorm")


class Calls(Stream):
    """The collectives of a script on one process set, whose ranks in the job are `ranks`."""

    joinable = frozenset((*_REDUCED, "SyncBatchNorm", "barrier"))

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(communicator)
        self.ranks = ranks
        self.optimizers: list[Stream] = []  # of every DistributedOptimizer, in the order in which all have made them
        self._writing: dict[int, tuple[int, int]] = {}  # memory of operations in place, until they are synchronized

    @cached_property
    def backend(self) -> Any:  # torch does not declare what it offers
        """The same communicator with c10d's interface, for alltoall. Closes it when it goes."""
        return Backend(self.communicator)

    def root(self, call: str, root_rank: int) -> int:
        """The root's number in this set. Raises InvalidUsage if there is no such rank."""
        if isinstance(root_rank, int) and root_rank in self.ranks:
            return self.ranks.index(root_rank)
        if self.ranks == range(self.size):
            there_are = "only rank 0" if self.size == 1 else f"ranks 0 to {self.size - 1}"
        else:
            there_are = f"ranks {', '.join(map(str, self.ranks))} in the process set"
        raise InvalidUsage(f"{call}: root_rank={root_rank!r}, but there are {there_are}")

    def check_free(self, call: str, tensor: torch.Tensor) -> None:
        """Raises InvalidUsage for memory that an operation in place has not written to its end."""
        if self._writing:
            first, last = _extent(tensor)
            if any(first < end and begin < last for begin, end in self._writing.values()):
                raise InvalidUsage(
                    f"{call}: another operation still writes this tensor, or some of it: call hvd.synchronize() on "
                    "the handle of that one before"
                )

    def begin_writing(self, tensor: torch.Tensor) -> None:
        """Until `end_writing`, for `check_free`."""
        self._writing[id(tensor)] = _extent(tensor)

    def end_writing(self, tensor: torch.Tensor) -> None:
        """See begin_writing."""
        self._writing.pop(id(tensor), None)

    def shadow(self, round: Round) -> Sequence[Work]:
        """Adds zeros to what the others reduce."""
        request = round.agreed
        kept = [torch.zeros(count, dtype=dtype_named(dtype), device="cpu") for dtype, count in request.flat]
        if request.kind in _REDUCED:
            word = request.how
            return [self.communicator.all_reduce(flat, engine_op(flat.dtype, word), async_op=True) for flat in kept]
        if request.kind == "SyncBatchNorm":
            whole = kept[0].new_empty(self.size * kept[0].numel())
            return [self.communicator.all_gather(whole, kept[0], async_op=True)]
        return ()


def gather(communicator: Communicator, whole: torch.Tensor, own: torch.Tensor, sizes: Sequence[int]) -> list[Work]:
    """Starts to put every rank's bytes into `whole`, in rank order. `sizes`: of each rank, in bytes."""
    if min(sizes) == max(sizes) > 0:
        return [communicator.all_gather(whole, own, async_op=True)]
    works = []
    for root, part in enumerate(whole.split(list(sizes))):
        if root == communicator.rank:
            part.copy_(own)
        if part.numel():
            works.append(communicator.broadcast(part, root, async_op=True))
    return works


def bytes_of_rows(round: Round, row: int) -> list[int]:
    """Of each rank, the bytes that it brings; `row`: of each of its rows."""
    return [request.own * row for request in round.requests]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which it lies."""
    first, last = tensor.data_ptr(), 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return first, first + (last + 1) * tensor.element_size() * bool(tensor.numel())
