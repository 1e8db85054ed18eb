"""The stream (see streams.py) of a script's collectives, and what a rank that has called join() does for each."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from syncengine._C import Backend, Communicator, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.reductions import check_list, engine_op
from syncengine.horovod.requests import Request
from syncengine.horovod.streams import Operation, Stream
from syncengine.parallel.replication import reach_of

_REDUCED = ("allreduce", "grouped_allreduce", "backward of SyncBatchNorm")


class Calls(Stream):
    """The collectives of a script on one process set, whose ranks in the job are `ranks`."""

    joinable = frozenset((*_REDUCED, "SyncBatchNorm", "barrier"))

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(communicator)
        self.ranks = ranks
        self.optimizers: list[Stream] = []  # every DistributedOptimizer's, in the order in which all made them
        self._writing: list[list[tuple[int, int]]] = []  # the ranges of memory that operations in place are writing

    @cached_property
    def backend(self) -> Any:  # torch does not declare what it offers
        """A c10d backend over the stream's communicator, for alltoall. Freeing the backend closes the communicator."""
        return Backend(self.communicator)

    def root(self, call: str, root_rank: int) -> int:
        """The index of the job's rank `root_rank` in this set. Raises InvalidUsage if the set has no such rank."""
        if isinstance(root_rank, int) and root_rank in self.ranks:
            return self.ranks.index(root_rank)
        if self.ranks == range(self.size):
            there_are = "only rank 0" if self.size == 1 else f"ranks 0 to {self.size - 1}"
        else:
            there_are = f"ranks {', '.join(map(str, self.ranks))} in the process set"
        raise InvalidUsage(f"{call}: root_rank={root_rank!r}, but there are {there_are}")

    def check(self, call: str, tensors: Any) -> None:
        """Raises InvalidUsage if `tensors` is no list of tensors, or an operation in place still writes one of them."""
        check_list(call, tensors)
        self._writing = list(filter(None, self._writing))
        for first, last in map(_extent, tensors) if self._writing else ():
            if any(first < end and begin < last for extents in self._writing for begin, end in extents):
                raise InvalidUsage(
                    f"{call}: another operation still writes this tensor, or some of it: call hvd.synchronize() on "
                    "the handle of that one before"
                )

    def keep(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
        """Notes that the operation writes these tensors, so that `check` refuses them until `result()` has ended."""
        operation.writes.extend(map(_extent, tensors))
        self._writing.append(operation.writes)

    def close_unneeded(self) -> None:
        """Closes optimizers' streams that no rank needs any more. All ranks call it, as none can know that alone."""
        if not self.optimizers:
            return
        needed = torch.tensor([each.needed for each in self.optimizers], dtype=torch.uint8, device="cpu")
        self.communicator.all_reduce(needed, "max")
        for each, still in zip(list(self.optimizers), needed.tolist(), strict=True):
            if not still:
                self.optimizers.remove(each)
                each.close()

    def shadow(self, request: Request) -> Sequence[Work]:
        """Takes part in an operation of the other ranks, with zeros."""
        kept = [torch.zeros(count, dtype=getattr(torch, dtype), device="cpu") for dtype, count in request.flat]
        if request.kind in _REDUCED:
            word = request.how
            return [self.communicator.all_reduce(flat, engine_op(flat.dtype, word), async_op=True) for flat in kept]
        if request.kind == "SyncBatchNorm":
            whole = kept[0].new_empty(self.size * kept[0].numel())
            return [self.communicator.all_gather(whole, kept[0], async_op=True)]
        return ()


def table(communicator: Communicator, row: Sequence[int]) -> list[list[int]]:
    """Every rank's `row` of numbers, which has the same length on all ranks. Blocks."""
    whole = torch.empty((communicator.size, len(row)), dtype=torch.int64, device="cpu")
    communicator.all_gather(whole, torch.tensor(row, dtype=torch.int64, device="cpu"))
    return whole.tolist()


def gather(communicator: Communicator, own: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, list[Work]]:
    """Starts to put every rank's rows into one tensor, in rank order. `rows` counts them; `own` is contiguous."""
    whole = own.new_empty((sum(rows), *own.shape[1:]))
    if not whole.numel():
        return whole, []
    if min(rows) == max(rows):
        return whole, [communicator.all_gather(as_bytes(whole), as_bytes(own), async_op=True)]
    works = []
    for root, part in enumerate(whole.split(list(rows))):
        if root == communicator.rank:
            part.copy_(own)
        if part.numel():
            works.append(communicator.broadcast(as_bytes(part), root, async_op=True))
    return whole, works


def apart(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat`, one after the other, with the shapes of the tensors in `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the tensor lies."""
    return tensor.data_ptr(), tensor.data_ptr() + reach_of(tensor)
