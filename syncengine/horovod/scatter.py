"""reducescatter and barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.allreduce import Compressor, arguments, launch
from syncengine.horovod.collective import collective
from syncengine.horovod.compression import Compression
from syncengine.horovod.gather import start_gather
from syncengine.horovod.handles import begin_group, synchronize
from syncengine.horovod.process import calls, size
from syncengine.horovod.process_sets import check_process_set, global_process_set
from syncengine.horovod.reductions import Average, ReduceOp, Sum, check_reducible, choose_op
from syncengine.horovod.requests import Request, describe


@collective
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: object = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts to reduce `tensor` over all ranks; the result on rank r is the r-th part along the first dimension.

    If the ranks do not divide the rows, the first ranks get one more. Returns a handle for `poll` and `synchronize`.
    """
    check_process_set("reducescatter", process_set)
    op = choose_op(op, None)
    check_reducible("reducescatter", [tensor], op)
    if tensor.dim() == 0:
        raise InvalidUsage("reducescatter cuts along the first dimension, which this tensor lacks: reshape(1) it")
    stream = calls()
    values = tensor.detach().clone(memory_format=torch.contiguous_format)
    what = f"{describe(values)}, {arguments(op, prescale_factor, postscale_factor)}"

    def own_part() -> torch.Tensor:
        return values.tensor_split(stream.size)[stream.rank].clone()

    # An all-reduce, so that those who have joined can take part whatever the number of rows.
    return launch("reducescatter", name, what, [values.view(-1)], op, prescale_factor, postscale_factor, own_part)


@collective
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: object = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the reduction of `tensor`. Gradients of Sum and Average flow through it.

    Else as `reducescatter_async`.
    """
    check_process_set("reducescatter", process_set)
    compressed, ctx = compression.compress(tensor)
    part = _ReduceScatter.apply(compressed, name, op, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    return compression.decompress(part, ctx)


@collective
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: object = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter_async` of several tensors; the result is a list."""
    names = [None if name is None else f"{name}.{i}" for i in range(len(tensors))]
    return begin_group(
        [
            reducescatter_async(tensor, each, op, process_set, prescale_factor, postscale_factor)
            for tensor, each in zip(tensors, names, strict=True)
        ]
    )


@collective
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: object = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors."""
    names = [None if name is None else f"{name}.{i}" for i in range(len(tensors))]
    return [
        reducescatter(tensor, each, compression, op, process_set, prescale_factor, postscale_factor)
        for tensor, each in zip(tensors, names, strict=True)
    ]


@collective
def barrier(process_set: object = global_process_set) -> None:
    """Returns once every rank has called it, or has joined."""
    check_process_set("barrier", process_set)
    calls().announce(Request("barrier")).wait()


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: ReduceOp, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.parameters = (op, prescale * postscale)
        ctx.shape = tensor.shape
        part: torch.Tensor = synchronize(
            reducescatter_async(tensor, name, op, prescale_factor=prescale, postscale_factor=postscale)
        )
        return part

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        op, factor = ctx.parameters
        if op not in (Sum, Average):
            raise InvalidUsage(f"reducescatter with op={op.name} has no gradient: use hvd.Sum or hvd.Average")
        gathered, rows = start_gather(grad_output)
        whole = grad_output.new_zeros(ctx.shape)
        for part, brought in zip(whole.tensor_split(size()), gathered.result().split(rows), strict=True):
            if len(brought):  # the parts of ranks that have joined have no gradient
                part.copy_(brought)
        return whole * (factor / (size() if op is Average else 1)), None, None, None, None
