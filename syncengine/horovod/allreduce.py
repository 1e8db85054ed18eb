"""allreduce, of one tensor or of a group, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.collective import collective
from syncengine.horovod.compression import Compression, NoneCompressor
from syncengine.horovod.handles import Operation, begin, synchronize
from syncengine.horovod.process import calls
from syncengine.horovod.process_sets import check_process_set, global_process_set
from syncengine.horovod.reductions import ReduceOp, assign, check_reducible, choose_op, engine_op, finish_average, scale
from syncengine.horovod.requests import Request, describe, dtype_name

Compressor = type[NoneCompressor]


@collective
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> int:
    """Starts to reduce a copy of `tensor` over all ranks; returns a handle for `poll` and `synchronize`.

    Shape, dtype, name and arguments are the same on all ranks. `op` is Average by default; `average` is its old form.
    Each rank's tensor is first multiplied by `prescale_factor`, the result by `postscale_factor`.
    """
    check_process_set("allreduce", process_set)
    op = choose_op(op, average)
    check_reducible("allreduce", [tensor], op)
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _start(copy, None, name, op, prescale_factor, postscale_factor)


@collective
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> int:
    """As `allreduce_async`, but in place."""
    check_process_set("allreduce", process_set)
    op = choose_op(op, average)
    check_reducible("allreduce", [tensor], op)
    values, target = tensor.detach(), None
    if not values.is_contiguous():
        target, values = values, values.contiguous()
    return _start(values, (tensor, target), name, op, prescale_factor, postscale_factor)


@collective
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, which gradients flow through: the backward is an allreduce, too.

    `compression` chooses the dtype in which it travels. Else as `allreduce_async`.
    """
    check_process_set("allreduce", process_set)
    op = choose_op(op, average)
    compressed, ctx = compression.compress(tensor)
    reduced = _AllReduce.apply(compressed, name, op, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


@collective
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` in place, and returns it. Else as `allreduce_async`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced


@collective
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> int:
    """As `allreduce_async`, of several tensors in one operation for each dtype; the result is a list."""
    check_process_set("grouped_allreduce", process_set)
    return _start_group(tensors, False, name, choose_op(op, average), prescale_factor, postscale_factor)


@collective
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> int:
    """As `grouped_allreduce_async`, but in place."""
    check_process_set("grouped_allreduce", process_set)
    return _start_group(tensors, True, name, choose_op(op, average), prescale_factor, postscale_factor)


@collective
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> list[torch.Tensor]:
    """As `allreduce`, of several tensors in one operation for each dtype."""
    check_process_set("grouped_allreduce", process_set)
    op = choose_op(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced: Sequence[torch.Tensor] = _GroupedAllReduce.apply(  # type: ignore[no-untyped-call]
        name, op, prescale_factor, postscale_factor, *(tensor for tensor, _ in compressed)
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


@collective
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> list[torch.Tensor]:
    """Reduces `tensors` in place, and returns them. Else as `grouped_allreduce_async`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced


def _start(
    values: torch.Tensor,
    in_place: tuple[torch.Tensor, torch.Tensor | None] | None,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> int:
    """Reduces `values`, which are contiguous. `in_place`: the tensor to return, and where to copy the result, if so."""
    what = f"{describe(values)}, {arguments(op, prescale, postscale)}"

    def finish() -> torch.Tensor:
        if in_place is None:
            return values
        tensor, target = in_place
        if target is not None:
            assign(target, values)
        return tensor

    return launch("allreduce", name, what, [values.view(-1)], op, prescale, postscale, finish)


def _start_group(
    tensors: Sequence[torch.Tensor], in_place: bool, name: str | None, op: ReduceOp, prescale: float, postscale: float
) -> int:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise InvalidUsage("grouped_allreduce needs a list of one or more tensors")
    check_reducible("grouped_allreduce", tensors, op)
    shapes = "; ".join(map(describe, tensors))
    what = f"{len(tensors)} tensors, {arguments(op, prescale, postscale)}: {shapes}"
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    members = [[i for i, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind] for kind in kinds]
    flats = [torch.cat([tensors[i].detach().reshape(-1) for i in group]) for group in members]

    def finish() -> list[torch.Tensor]:
        results = list(tensors)
        for flat, group in zip(flats, members, strict=True):
            for i, part in zip(group, flat.split([tensors[i].numel() for i in group]), strict=True):
                if in_place:
                    assign(tensors[i], part.view(tensors[i].shape))
                else:
                    results[i] = part.view(tensors[i].shape)
        return results

    return launch("grouped_allreduce", name, what, flats, op, prescale, postscale, finish)


def launch(
    kind: str,
    name: str | None,
    what: str,
    flats: Sequence[torch.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    finish: Callable[[], Any],
) -> int:
    """Reduces `flats` in place; the result of the operation is `finish()`, once they are reduced and scaled."""
    stream = calls()
    layout = [(dtype_name(flat.dtype), flat.numel()) for flat in flats]
    announcement = stream.announce(Request(kind, name or "", what, layout, op.value))
    works = []
    with announcement.explains():
        for flat in flats:
            scale(flat, prescale)
            works.append(stream.communicator.all_reduce(flat, engine_op(flat.dtype, op), async_op=True))

    def finish_all(_: object) -> Any:
        for flat in flats:
            finish_average(flat, op, stream.size)
            scale(flat, postscale)
        return finish()

    return begin(Operation(announcement, works, finish_all, flats))


def arguments(op: ReduceOp, prescale: float, postscale: float) -> str:
    """For messages, and to be compared between ranks."""
    factors = "".join(
        f", {name}_factor={float(factor * 1.0)!r}"  # a text is an error
        for name, factor in (("prescale", prescale), ("postscale", postscale))
        if factor != 1.0
    )
    return f"op={op.name}{factors}"


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: ReduceOp, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.parameters = (op, prescale, postscale)
        reduced: torch.Tensor = synchronize(allreduce_async(tensor, None, name, op, prescale, postscale))
        return reduced

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        op, prescale, postscale = ctx.parameters
        reduced = allreduce(grad_output, op=op, prescale_factor=prescale, postscale_factor=postscale)
        return reduced, None, None, None, None


class _GroupedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.parameters = (op, prescale, postscale)
        return tuple(synchronize(grouped_allreduce_async(tensors, None, name, op, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        op, prescale, postscale = ctx.parameters
        reduced = grouped_allreduce(grad_outputs, op=op, prescale_factor=prescale, postscale_factor=postscale)
        return None, None, None, None, *reduced
