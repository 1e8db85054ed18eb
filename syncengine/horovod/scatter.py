"""reducescatter and barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import reducing
from syncengine.horovod.calls import Calls
from syncengine.horovod.collective import Call, start, taking, through
from syncengine.horovod.gather import allgather, calls_for_each
from syncengine.horovod.handles import begin, begin_group
from syncengine.horovod.process_sets import ProcessSet, global_process_set, stream_of
from syncengine.horovod.reductions import Average, Sum, check_reducible
from syncengine.horovod.streams import Plan

Tensors = Sequence[torch.Tensor]
_SCATTERING = "name op process_set prescale_factor postscale_factor"
_SCATTERING_COMPRESSED = "name compression op process_set prescale_factor postscale_factor"


@taking(_SCATTERING)
def reducescatter_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to reduce `tensor` over all ranks; the result on rank r is the r-th part along the first dimension.

    `op` is Average by default. If the ranks do not divide the rows, the first ranks get one more. Returns a handle for
    `poll` and `synchronize`.
    """
    return begin(start(call, _prepare, [tensor]))


@taking(_SCATTERING_COMPRESSED)
def reducescatter(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the reduction of `tensor`. Gradients of Sum and Average flow through it, as in Horovod.

    Which are those of the other ranks' parts, gathered; those of a Sum times the number of ranks. Else as
    `reducescatter_async`.
    """
    return _reducescatter(call, tensor)


@taking(_SCATTERING)
def grouped_reducescatter_async(call: Call, tensors: Tensors) -> int:
    """`reducescatter_async` of several tensors; the result is a list."""
    return begin_group([begin(start(each, _prepare, [tensor])) for each, tensor in calls_for_each(call, tensors)])


@taking(_SCATTERING_COMPRESSED)
def grouped_reducescatter(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """`reducescatter` of several tensors."""
    return [_reducescatter(each, tensor) for each, tensor in calls_for_each(call, tensors)]


def barrier(process_set: ProcessSet | None = global_process_set) -> None:
    """Returns once every rank has called it, or has joined."""
    start(Call("barrier", None, process_set), lambda *_: Plan()).result()


def _reducescatter(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    def gradient(of_part: torch.Tensor) -> Tensors:
        if call.op not in (Sum, Average, None):
            raise InvalidUsage(f"reducescatter with op={call.op} has no gradient: use hvd.Sum or hvd.Average")
        ranks = stream_of(call.process_set).size if call.op is Sum else 1
        whole = allgather(of_part, process_set=call.process_set)
        return [whole * (ranks * call.prescale_factor * call.postscale_factor)]

    part: torch.Tensor = through(call, gradient, _prepare, [tensor])
    return part


def _prepare(stream: Calls, call: Call, tensors: Tensors) -> Plan:
    (tensor,) = tensors
    op = call.reduction()
    check_reducible(call.kind, tensor, op)
    if tensor.dim() == 0:
        raise InvalidUsage("reducescatter cuts along the first dimension, which this tensor lacks: reshape(1) it")
    stream.check_free(call.kind, tensor)
    values = tensor.detach().clone(memory_format=torch.contiguous_format)

    def own_part(_: object) -> torch.Tensor:
        return values.tensor_split(stream.size)[stream.rank].clone()

    return reducing(stream, call, op, str(tuple(tensor.shape)), [values.view(-1)], own_part)
