"""The collectives allgather, alltoall and reducescatter, which work along the first dimension, and barrier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import average_of, reducing
from syncengine.horovod.calls import Calls, as_bytes, gather, table
from syncengine.horovod.collective import Call, Result, Tensors, perform, start, taking
from syncengine.horovod.process_sets import ProcessSet, global_process_set, stream_of
from syncengine.horovod.reductions import Average, ReduceOp, Sum, in_order, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan, Round

Splits = torch.Tensor | Sequence[int] | None

_ARGUMENTS = "name op process_set prescale_factor postscale_factor"
_COMPRESSED_ARGUMENTS = "name compression op process_set prescale_factor postscale_factor"


@taking("name process_set")
def allgather_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to concatenate every rank's `tensor` along the first dimension, which may differ between ranks.

    Dtype and the other dimensions are the same on all ranks. Returns a handle for `poll` and `synchronize`.
    """
    return _gather_rows(call, [tensor])


@taking("name process_set")
def allgather(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates every rank's `tensor` in rank order along the first dimension, which may differ between ranks.

    Gradients flow through it, as in Horovod: each rank's rows get the average of all ranks' gradients for them.
    """
    return _gather_rows(call, [tensor])


@taking("name process_set")
def grouped_allgather_async(call: Call, tensors: Tensors) -> int:
    """Concatenates several tensors as `allgather_async` does; the result is a list."""
    return _gather_rows(call, tensors)


@taking("name process_set")
def grouped_allgather(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Concatenates each of `tensors` over the ranks, as `allgather` does; the result is a list."""
    return _gather_rows(call, tensors)


@taking("name process_set")
def alltoall_async(call: Call, tensor: torch.Tensor, splits: Splits = None) -> int:
    """Starts to send rank r the r-th part of `tensor` along its first dimension: `splits[r]` rows, or equal parts.

    The result is a pair: the rows from every rank in rank order, and how many each has sent. Returns a handle.
    """
    return perform(call, [tensor], _exchanging, None, splits, [])


@taking("name process_set")
def alltoall(
    call: Call, tensor: torch.Tensor, splits: Splits = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that every rank sends this one, in rank order; if `splits` is given, also how many each has sent.

    Gradients flow back to the ranks that sent the rows. Otherwise as `alltoall_async`.
    """
    counts: list[torch.Tensor] = []

    def gradient(_: Call, of_rows: torch.Tensor) -> Tensors:
        return [alltoall(of_rows, counts[0].tolist(), process_set=call.process_set)[0]]

    whole: Any = perform(call, [tensor], _exchanging, gradient, splits, counts)
    return whole if splits is None else (whole, counts[0])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts to gather every rank's indices and values of a sparse `tensor`; returns a function for the result.

    The result is a sparse tensor, not coalesced. `op` is Average or Sum.
    """

    def prepare(stream: Calls, call: Call) -> Plan:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise InvalidUsage(f"{call.kind} needs a sparse tensor of layout torch.sparse_coo")
        if op not in (Average, Sum):
            raise InvalidUsage(f"{call.kind}: op={op!r} is neither hvd.Average nor hvd.Sum")
        return gathering(stream, call, [tensor._indices().t(), tensor._values()], [])

    operation = start(Call("sparse_allreduce_async", name, process_set, watched=True, grouped=True), prepare)

    def result() -> torch.Tensor:
        at, values = operation.result()
        if op is Average:
            values = values / stream_of(process_set).size
        return torch.sparse_coo_tensor(at.t(), values, tensor.shape, device=tensor.device)

    return result


def gathering(stream: Calls, call: Call, tensors: Tensors, counts: list[Sequence[int]]) -> Plan:
    """Plans to gather every rank's rows. `counts` will have the number of rows of each rank, for each tensor."""
    owns = _rows(stream, call, tensors)
    wholes: list[torch.Tensor] = []

    def begin(round: Round) -> Sequence[Work]:
        # A request has room for one count of rows. For a list of tensors, another collective gathers the counts.
        rows = [len(own) for own in owns]
        of_ranks = table(stream.communicator, rows) if call.grouped else [[request.own] for request in round]
        works: list[Work] = []
        for own, of_own in zip(owns, zip(*of_ranks, strict=True), strict=True):
            whole, moving = gather(stream.communicator, own, of_own)
            wholes.append(whole)
            works += moving
            counts.append(of_own)
        return works

    what = "; ".join(describe(own, any_rows=True) for own in owns)
    own = 0 if call.grouped else len(owns[0])
    return Plan(what, own=own, begin=in_order(owns, begin), finish=lambda: wholes if call.grouped else wholes[0])


def _gather_rows(call: Call, tensors: Tensors) -> Result:  # type: ignore[type-var]
    counts: list[Sequence[int]] = []

    def gradient(call: Call, *of_wholes: torch.Tensor) -> Tensors:
        me = stream_of(call.process_set).rank
        averages = zip(average_of(call, of_wholes), counts, strict=True)
        return [average.narrow(0, sum(of_ranks[:me]), of_ranks[me]) for average, of_ranks in averages]

    return perform(call, tensors, gathering, gradient, counts)


def _exchanging(stream: Calls, call: Call, tensors: Tensors, splits: Splits, counts: list[torch.Tensor]) -> Plan:
    """Plans an alltoall. `counts` will have the number of rows that each rank has sent."""
    (own,) = _rows(stream, call, tensors)
    sent = _split_rows(len(own), splits, stream.size)
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    whole = own

    def exchange(_: Round) -> Sequence[Work]:
        nonlocal whole
        of_ranks = table(stream.communicator, sent)
        received = [row[stream.rank] for row in of_ranks]
        counts[:] = [torch.tensor(received, dtype=like.dtype, device=like.device)]
        whole = own.new_empty((sum(received), *own.shape[1:]))
        row = math.prod(own.shape[1:]) * own.element_size()
        if not row or not any(map(any, of_ranks)):
            return ()
        out_bytes, in_bytes = ([count * row for count in part] for part in (received, sent))
        options = dist.AllToAllOptions()
        return [stream.backend.alltoall_base(as_bytes(whole), as_bytes(own), out_bytes, in_bytes, options)]

    def finish() -> Any:
        return (whole, *counts) if call.watched else whole

    return Plan(describe(own, any_rows=True), begin=in_order([own], exchange), finish=finish)


def _rows(stream: Calls, call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """The tensors, each row by row in memory."""
    stream.check(call.kind, tensors)
    rows = []
    for tensor in tensors:
        if tensor.dim() == 0:
            raise InvalidUsage(f"{call.kind} works along the first dimension, which this tensor lacks: reshape(1) it")
        own = plain(tensor)
        if call.watched and own.data_ptr() == tensor.data_ptr():
            own = own.clone()  # it may be changed before all ranks have come
        rows.append(own)
    return rows


def _split_rows(rows: int, splits: Splits, ranks: int) -> list[int]:
    if splits is None:
        if rows % ranks:
            raise InvalidUsage(f"alltoall: {rows} rows can't be cut into {ranks} equal parts: give splits=")
        return [rows // ranks] * ranks
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    if not isinstance(counts, (list, tuple)) or not all(isinstance(count, int) for count in counts):
        raise InvalidUsage(f"alltoall: splits={splits!r} must be whole numbers: a list, or a tensor of dtype int32")
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise InvalidUsage(
            f"alltoall: splits={counts} must be {ranks} numbers of rows, one for each rank, that add up to {rows}"
        )
    return list(counts)


@taking(_ARGUMENTS)
def reducescatter_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to reduce `tensor` over all ranks; the result on rank r is the r-th part along the first dimension.

    `op` is Average by default. If the ranks do not divide the rows, the first ranks get one more. Returns a handle for
    `poll` and `synchronize`.
    """
    return perform(call, [tensor], _scattering, _gradient)


@taking(_COMPRESSED_ARGUMENTS)
def reducescatter(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the reduction of `tensor`. Gradients of Sum and Average flow through it, as in Horovod.

    The gradient is gathered from all ranks' parts; for a Sum it is multiplied by the number of ranks. Otherwise as
    `reducescatter_async`.
    """
    return perform(call, [tensor], _scattering, _gradient)


@taking(_ARGUMENTS)
def grouped_reducescatter_async(call: Call, tensors: Tensors) -> int:
    """Reduces several tensors as `reducescatter_async` does; the result is a list."""
    return perform(call, tensors, _scattering, _gradient)


@taking(_COMPRESSED_ARGUMENTS)
def grouped_reducescatter(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Reduces several tensors as `reducescatter` does."""
    return perform(call, tensors, _scattering, _gradient)


def barrier(process_set: ProcessSet | None = global_process_set) -> None:
    """Blocks until every rank has called it, or has joined."""
    start(Call("barrier", None, process_set), lambda *_: Plan()).result()


def _gradient(call: Call, *of_parts: torch.Tensor) -> list[torch.Tensor]:
    if call.op not in (Sum, Average, None):
        raise InvalidUsage(f"{call.kind} with op={call.op} has no gradient: use hvd.Sum or hvd.Average")
    if call.grouped:
        wholes = grouped_allgather(of_parts, process_set=call.process_set)
    else:
        wholes = [allgather(of_parts[0], process_set=call.process_set)]
    factor = call.prescale_factor * call.postscale_factor * (stream_of(call.process_set).size if call.op is Sum else 1)
    return [whole * factor for whole in wholes]


def _scattering(stream: Calls, call: Call, tensors: Tensors) -> Plan:
    plan = reducing(stream, call, tensors, lambda whole: whole.tensor_split(stream.size)[stream.rank].clone())
    if any(tensor.dim() == 0 for tensor in tensors):
        raise InvalidUsage(f"{call.kind} cuts along the first dimension, which this tensor lacks: reshape(1) it")
    return plan
