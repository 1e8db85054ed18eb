"""The collectives reducescatter and barrier."""

from __future__ import annotations

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import reducing
from syncengine.horovod.calls import Calls
from syncengine.horovod.collective import Call, Tensors, perform, start, taking
from syncengine.horovod.gather import allgather, grouped_allgather
from syncengine.horovod.process_sets import ProcessSet, global_process_set, stream_of
from syncengine.horovod.reductions import Average, Sum
from syncengine.horovod.streams import Plan

_ARGUMENTS = "name op process_set prescale_factor postscale_factor"
_COMPRESSED_ARGUMENTS = "name compression op process_set prescale_factor postscale_factor"


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
