"""allgather and alltoall: rows from every rank, as many as each has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import allreduce
from syncengine.horovod.calls import as_bytes, bytes_of_rows, bytes_request
from syncengine.horovod.collective import collective
from syncengine.horovod.handles import Operation, begin, begin_group, synchronize
from syncengine.horovod.process import calls, rank
from syncengine.horovod.process_sets import check_process_set, global_process_set
from syncengine.horovod.reductions import Average, check_dense, plain
from syncengine.horovod.requests import describe


@collective
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: object = global_process_set) -> int:
    """Starts to concatenate every rank's `tensor` along the first dimension, which may differ between ranks.

    Dtype and the other dimensions are the same on all ranks. Returns a handle for `poll` and `synchronize`, once every
    rank has called it: until then the size of the result is not known.
    """
    check_process_set("allgather", process_set)
    return begin(start_gather(tensor, name)[0])


@collective
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: object = global_process_set) -> torch.Tensor:
    """Every rank's `tensor`, concatenated along the first dimension in rank order, which may differ between ranks.

    Gradients flow through it: each rank gets the average over all ranks of the gradient of its own rows, as in Horovod.
    """
    check_process_set("allgather", process_set)
    gathered: torch.Tensor = _AllGather.apply(tensor, name)  # type: ignore[no-untyped-call]
    return gathered


@collective
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: object = global_process_set
) -> int:
    """`allgather_async` of several tensors; the result is a list."""
    check_process_set("grouped_allgather", process_set)
    return begin_group([allgather_async(tensor, _numbered(name, i)) for i, tensor in enumerate(tensors)])


@collective
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: object = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    check_process_set("grouped_allgather", process_set)
    return [allgather(tensor, _numbered(name, i)) for i, tensor in enumerate(tensors)]


@collective
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = global_process_set,
) -> int:
    """Starts to send rank r the r-th part of `tensor` along its first dimension: `splits[r]` rows, or equal parts.

    The result is a pair: the rows from every rank in rank order, and how many each has sent. Returns a handle once
    every rank has called it.
    """
    check_process_set("alltoall", process_set)
    _check_rows("alltoall", tensor)
    stream = calls()
    own = plain(tensor)
    counts = _split_rows(own.shape[0], splits, stream.size)
    row = math.prod(own.shape[1:]) * own.element_size()
    announcement = stream.announce(bytes_request("alltoall", name or "", describe(own, any_rows=True), row))
    stream.refuse_joined(announcement.wait())
    with announcement.explains():
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu")
        table = torch.empty((stream.size, stream.size), dtype=torch.int64, device="cpu")
        stream.communicator.all_gather(table, mine)
        received = table[:, stream.rank].tolist()
        whole = torch.empty((sum(received), *own.shape[1:]), dtype=own.dtype, device=own.device)
        if table.any() and row:
            out_bytes, in_bytes = ([count * row for count in part] for part in (received, counts))
            options = dist.AllToAllOptions()
            stream.backend.alltoall_base(as_bytes(whole), as_bytes(own), out_bytes, in_bytes, options).wait()
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    result = (whole, torch.tensor(received, dtype=like.dtype, device=like.device))
    return begin(Operation(announcement, [], lambda _: result))


@collective
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that every rank sends this one, in rank order; if `splits` is given, also how many each has sent.

    Gradients flow back to the ranks that sent the rows. Else as `alltoall_async`.
    """
    check_process_set("alltoall", process_set)
    whole, received = _AllToAll.apply(tensor, splits, name)  # type: ignore[no-untyped-call]
    return whole if splits is None else (whole, received)


def start_gather(tensor: torch.Tensor, name: str | None = None) -> tuple[Operation, list[int]]:
    """The operation of `allgather_async`, and how many rows each rank has brought: those who have joined, none."""
    _check_rows("allgather", tensor)
    stream = calls()
    own = plain(tensor)
    row = math.prod(own.shape[1:]) * own.element_size()
    request = bytes_request("allgather", name or "", describe(own, any_rows=True), row, own=own.shape[0])
    announcement = stream.announce(request)
    round = announcement.wait()
    rows = bytes_of_rows(round, 1)
    with announcement.explains():
        whole = torch.empty((sum(rows), *own.shape[1:]), dtype=own.dtype, device=own.device)
        works = stream.gather(as_bytes(whole), as_bytes(own), bytes_of_rows(round, row))
    return Operation(announcement, works, lambda _: whole, own), rows


def _numbered(name: str | None, number: int) -> str | None:
    return None if name is None else f"{name}.{number}"


def _check_rows(call: str, tensor: torch.Tensor) -> None:
    check_dense(call, tensor)
    if tensor.dim() == 0:
        raise InvalidUsage(f"{call} concatenates along the first dimension, which this tensor lacks: reshape(1) it")


def _split_rows(rows: int, splits: torch.Tensor | Sequence[int] | None, ranks: int) -> list[int]:
    if splits is None:
        if rows % ranks:
            raise InvalidUsage(f"alltoall: {rows} rows can't be cut into {ranks} equal parts: give splits=")
        return [rows // ranks] * ranks
    counts = [int(count) for count in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise InvalidUsage(
            f"alltoall: splits={counts} must be {ranks} numbers of rows, one for each rank, that add up to {rows}"
        )
    return counts


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        gathered, rows = start_gather(tensor, name)
        # Asked of the ranks in backward, those who have joined since would not answer.
        ctx.first, ctx.rows = sum(rows[: rank()]), rows[rank()]
        whole: torch.Tensor = gathered.result()
        return whole

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        return allreduce(grad_output, op=Average).narrow(0, ctx.first, ctx.rows), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None) -> Any:
        whole, received = synchronize(alltoall_async(tensor, splits, name))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return whole, received

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> Any:
        returned = alltoall(grad_output, ctx.received)
        return returned[0], None, None
