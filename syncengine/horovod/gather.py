"""allgather and alltoall: rows from every rank, as many as each has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Work
from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import average_of
from syncengine.horovod.calls import Calls, as_bytes, bytes_of_rows, gather
from syncengine.horovod.collective import Call, start, taking, through
from syncengine.horovod.handles import begin, begin_group, synchronize
from syncengine.horovod.process_sets import ProcessSet, global_process_set, stream_of
from syncengine.horovod.reductions import Average, ReduceOp, Sum, check_dense, check_list, in_order, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan, Round

Tensors = Sequence[torch.Tensor]
Splits = torch.Tensor | Sequence[int] | None


@taking("name process_set")
def allgather_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to concatenate every rank's `tensor` along the first dimension, which may differ between ranks.

    Dtype and the other dimensions are the same on all ranks. Returns a handle for `poll` and `synchronize`.
    """
    return begin(start(call, gathering, [tensor]))


@taking("name process_set")
def allgather(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor`, concatenated along the first dimension in rank order, which may differ between ranks.

    Gradients flow through it: each rank gets the average over all ranks of the gradient of its own rows, as in Horovod.
    """
    return _allgather(call, tensor)


@taking("name process_set")
def grouped_allgather_async(call: Call, tensors: Tensors) -> int:
    """`allgather_async` of several tensors; the result is a list."""
    return begin_group([begin(start(each, gathering, [tensor])) for each, tensor in calls_for_each(call, tensors)])


@taking("name process_set")
def grouped_allgather(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    return [_allgather(each, tensor) for each, tensor in calls_for_each(call, tensors)]


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> int:
    """Starts to send rank r the r-th part of `tensor` along its first dimension: `splits[r]` rows, or equal parts.

    The result is a pair: the rows from every rank in rank order, and how many each has sent. Returns a handle.
    """
    counts: list[torch.Tensor] = []
    call = Call("alltoall", name, process_set, watched=True)
    return begin(start(call, _exchanging, [tensor], splits, counts, lambda whole: (whole, *counts)))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that every rank sends this one, in rank order; if `splits` is given, also how many each has sent.

    Gradients flow back to the ranks that sent the rows. Else as `alltoall_async`.
    """
    counts: list[torch.Tensor] = []

    def gradient(of_rows: torch.Tensor) -> Tensors:
        return [alltoall(of_rows, counts[0].tolist(), process_set=process_set)[0]]

    whole = through(Call("alltoall", name, process_set), gradient, _exchanging, [tensor], splits, counts)
    return whole if splits is None else (whole, counts[0])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts to gather every rank's indices and values of a sparse `tensor`; returns a function for the result.

    Which is a sparse tensor, not coalesced; `op` is Average or Sum.
    """
    with stream_of(process_set, "sparse_allreduce_async").refusing("sparse_allreduce_async"):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise InvalidUsage("sparse_allreduce_async needs a sparse tensor of layout torch.sparse_coo")
        if op not in (Average, Sum):
            raise InvalidUsage(f"sparse_allreduce_async: op={op!r} is neither hvd.Average nor hvd.Sum")
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices = allgather_async(tensor._indices().t(), names[0], process_set)
    values = allgather_async(tensor._values(), names[1], process_set)

    def result() -> torch.Tensor:
        of_all, at = synchronize(values), synchronize(indices)
        if op is Average:
            of_all = of_all / stream_of(process_set).size
        return torch.sparse_coo_tensor(at.t(), of_all, tensor.shape, device=tensor.device)

    return result


def gathering(stream: Calls, call: Call, tensors: Tensors, rows: list[int] | None = None) -> Plan:
    """Every rank's rows; how many each has brought will be in `rows`."""
    own, row = _rows(stream, call, tensors)
    whole = own

    def begin(round: Round) -> Sequence[Work]:
        nonlocal whole
        counts = bytes_of_rows(round, 1)
        whole = torch.empty((sum(counts), *own.shape[1:]), dtype=own.dtype, device=own.device)
        if rows is not None:
            rows[:] = counts
        return gather(stream.communicator, as_bytes(whole), as_bytes(own), bytes_of_rows(round, row))

    what = describe(own, any_rows=True)
    return Plan(what, (("uint8", row),), "", own.shape[0], in_order(own, begin), lambda _: whole)


def calls_for_each(call: Call, tensors: Tensors) -> list[tuple[Call, torch.Tensor]]:
    """Of a group's tensors."""
    with stream_of(call.process_set, call.kind).refusing(call.kind):
        check_list(call.kind, tensors)
    return [(call.numbered(i), tensor) for i, tensor in enumerate(tensors)]


def _allgather(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    rows: list[int] = []

    def gradient(of_whole: torch.Tensor) -> Tensors:
        me = stream_of(call.process_set).rank
        return [average_of(call, of_whole).narrow(0, sum(rows[:me]), rows[me])]

    gathered: torch.Tensor = through(call, gradient, gathering, [tensor], rows)
    return gathered


def _exchanging(
    stream: Calls,
    call: Call,
    tensors: Tensors,
    splits: Splits,
    counts: list[torch.Tensor],
    result: Callable[[torch.Tensor], Any] = lambda whole: whole,
) -> Plan:
    """How many rows each rank has sent will be in `counts`."""
    own, row = _rows(stream, call, tensors)
    sent = _split_rows(own.shape[0], splits, stream.size)
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    whole = own

    def exchange(_: Round) -> Sequence[Work]:
        nonlocal whole
        mine = torch.tensor(sent, dtype=torch.int64, device="cpu")
        table = torch.empty((stream.size, stream.size), dtype=torch.int64, device="cpu")
        stream.communicator.all_gather(table, mine)
        received = table[:, stream.rank].tolist()
        counts[:] = [torch.tensor(received, dtype=like.dtype, device=like.device)]
        whole = torch.empty((sum(received), *own.shape[1:]), dtype=own.dtype, device=own.device)
        if not table.any() or not row:
            return ()
        out_bytes, in_bytes = ([count * row for count in part] for part in (received, sent))
        options = dist.AllToAllOptions()
        return [stream.backend.alltoall_base(as_bytes(whole), as_bytes(own), out_bytes, in_bytes, options)]

    what = describe(own, any_rows=True)
    return Plan(what, (("uint8", row),), "", 0, in_order(own, exchange), lambda _: result(whole))


def _rows(stream: Calls, call: Call, tensors: Tensors) -> tuple[torch.Tensor, int]:
    """The tensor row by row, and how many bytes a row has."""
    (tensor,) = tensors
    check_dense(call.kind, tensor)
    if tensor.dim() == 0:
        raise InvalidUsage(f"{call.kind} works along the first dimension, which this tensor lacks: reshape(1) it")
    stream.check_free(call.kind, tensor)
    own = plain(tensor)
    if call.watched and own.data_ptr() == tensor.data_ptr():
        own = own.clone()  # it may be changed before all ranks have come
    return own, math.prod(own.shape[1:]) * own.element_size()


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
