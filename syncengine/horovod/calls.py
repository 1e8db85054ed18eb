"""The stream of the collectives that a script calls, and what a rank that has joined does for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from syncengine._C import Backend, Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.reductions import ReduceOp, engine_op
from syncengine.horovod.requests import Request, dtype_named
from syncengine.horovod.streams import Round, Stream


class Calls(Stream):
    """The collectives of a script."""

    @cached_property
    def backend(self) -> Any:  # torch does not declare what it offers
        """The same communicator with c10d's interface, for alltoall. Closes it when it goes."""
        return Backend(self.communicator)

    def check_root(self, call: str, root_rank: int) -> None:
        """Raises InvalidUsage if there is no such rank."""
        if not 0 <= root_rank < self.size:
            from_to = "only rank 0" if self.size == 1 else f"ranks 0 to {self.size - 1}"
            raise InvalidUsage(f"{call}: root_rank={root_rank}, but there are {from_to}")

    def gather(self, whole: torch.Tensor, own: torch.Tensor | None, sizes: Sequence[int]) -> list[Work]:
        """Starts to put every rank's bytes into `whole`, in rank order. `sizes`: of each rank, in bytes.

        `own`: this rank's bytes; None if it has none.
        """
        if own is not None and min(sizes) == max(sizes) > 0:
            return [self.communicator.all_gather(whole, own, async_op=True)]
        works = []
        for root, part in enumerate(whole.split(list(sizes))):
            if root == self.rank and own is not None:
                part.copy_(own)
            if part.numel():
                works.append(self.communicator.broadcast(part, root, async_op=True))
        return works

    def shadow(self, round: Round) -> None:
        """Adds zeros to what the others reduce, and takes part in what they broadcast or gather."""
        request = round.agreed
        assert request is not None
        works: list[Work] = []
        kept = [torch.zeros(count, dtype=dtype_named(dtype), device="cpu") for dtype, count in request.flat]
        if request.kind in ("allreduce", "grouped_allreduce", "reducescatter", "backward of SyncBatchNorm"):
            op = ReduceOp(request.how)
            works = [self.communicator.all_reduce(flat, engine_op(flat.dtype, op), async_op=True) for flat in kept]
        elif request.kind == "allgather":
            works = self._shadow_gather(round, kept)
        elif request.kind == "SyncBatchNorm":
            whole = kept[0].new_empty(self.size * kept[0].numel())
            works = [self.communicator.all_gather(whole, kept[0], async_op=True)]
        elif request.kind == "broadcast":
            if int(request.how) in round.joined:
                self.refuse_joined(round)
            works = [self.communicator.broadcast(flat, int(request.how), async_op=True) for flat in kept]
        elif request.kind != "barrier":
            self.refuse_joined(round)
        for work in works:
            work.wait()

    def _shadow_gather(self, round: Round, row: Sequence[torch.Tensor]) -> list[Work]:
        sizes = bytes_of_rows(round, row[0].numel())
        return self.gather(torch.empty(sum(sizes), dtype=torch.uint8, device="cpu"), None, sizes)


def bytes_of_rows(round: Round, row: int) -> list[int]:
    """Of each rank, the bytes that it brings; `row`: of each of its rows."""
    joined = round.joined
    return [0 if rank in joined else request.own * row for rank, request in enumerate(round.requests)]


def bytes_request(kind: str, name: str, what: str, count: int, how: str = "", own: int = 0) -> Request:
    """For what travels as bytes, of whatever dtype."""
    return Request(kind, name, what, [("uint8", count)], how, own)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
