"""allreduce, of one tensor or of a group, and its variants."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncengine._C import Work
from syncengine.horovod.calls import Calls
from syncengine.horovod.collective import Call, start, taking, through
from syncengine.horovod.handles import begin
from syncengine.horovod.reductions import (
    ReduceOp,
    assign,
    check_list,
    check_reducible,
    engine_op,
    finish_average,
    in_order,
    scale,
)
from syncengine.horovod.requests import dtype_name
from syncengine.horovod.streams import Plan

Tensors = Sequence[torch.Tensor]
_dtype = operator.attrgetter("dtype")
_REDUCING = "average name op prescale_factor postscale_factor process_set"
_REDUCING_COMPRESSED = "average name compression op prescale_factor postscale_factor process_set"


@taking(_REDUCING)
def allreduce_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to reduce a copy of `tensor` over all ranks; returns a handle for `poll` and `synchronize`.

    Shape, dtype, name and arguments are the same on all ranks. `op` is Average by default; `average` is its old form.
    Each rank's tensor is first multiplied by `prescale_factor`, the result by `postscale_factor`.
    """
    return begin(start(call, _one, [tensor]))


@taking(_REDUCING)
def allreduce_async_(call: Call, tensor: torch.Tensor) -> int:
    """As `allreduce_async`, but in place; no other operation may use the tensor until `synchronize`."""
    return begin(start(call, _one, [tensor], True))


@taking(_REDUCING_COMPRESSED)
def allreduce(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, which gradients flow through: the backward is an allreduce, too.

    `compression` chooses the dtype in which it travels. Else as `allreduce_async`.
    """
    reduced: torch.Tensor = through(call, functools.partial(_gradient, call), _one, [tensor])
    return reduced


@taking(_REDUCING)
def allreduce_(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Reduces `tensor` in place, and returns it. Else as `allreduce_async`."""
    reduced: torch.Tensor = start(call, _one, [tensor], True).result()
    return reduced


@taking(_REDUCING)
def grouped_allreduce_async(call: Call, tensors: Tensors) -> int:
    """As `allreduce_async`, of several tensors in one operation for each dtype; the result is a list."""
    return begin(start(call, _group, tensors))


@taking(_REDUCING)
def grouped_allreduce_async_(call: Call, tensors: Tensors) -> int:
    """As `grouped_allreduce_async`, but in place; no other operation may use the tensors until `synchronize`."""
    return begin(start(call, _group, tensors, True))


@taking(_REDUCING_COMPRESSED)
def grouped_allreduce(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """As `allreduce`, of several tensors in one operation for each dtype."""
    return list(through(call, functools.partial(_gradients, call), _group, tensors))


@taking(_REDUCING)
def grouped_allreduce_(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Reduces `tensors` in place, and returns them. Else as `grouped_allreduce_async`."""
    reduced: list[torch.Tensor] = start(call, _group, tensors, True).result()
    return reduced


def _gradient(call: Call, gradient: torch.Tensor) -> Tensors:
    again = call.without_name()
    return [through(again, functools.partial(_gradient, again), _one, [gradient])]


def _gradients(call: Call, *gradients: torch.Tensor) -> Tensors:
    again = call.without_name()
    reduced: Tensors = through(again, functools.partial(_gradients, again), _group, gradients)
    return reduced


def average_of(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Over the same ranks: the gradient of what only moves tensors, in Horovod."""
    again = Call("allreduce", process_set=call.process_set)
    reduced: torch.Tensor = through(again, functools.partial(_gradient, again), _one, [tensor])
    return reduced


def _one(stream: Calls, call: Call, tensors: Tensors, in_place: bool = False) -> Plan:
    tensor = tensors[0]
    op = call.reduction()
    check_reducible(call.kind, tensor, op)
    stream.check_free(call.kind, tensor)
    values = tensor.detach()
    if not in_place or not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)

    def finish(_: object) -> torch.Tensor:
        if not in_place:
            return values
        if values.data_ptr() != tensor.data_ptr():
            assign(tensor, values)
        stream.end_writing(tensor)
        return tensor

    plan = reducing(stream, call, op, str(tuple(tensor.shape)), [values.view(-1)], finish)
    if in_place:
        stream.begin_writing(tensor)
    return plan


def _group(stream: Calls, call: Call, tensors: Tensors, in_place: bool = False) -> Plan:
    op = call.reduction()
    check_list(call.kind, tensors)
    for tensor in tensors:
        check_reducible(call.kind, tensor, op)
        stream.check_free(call.kind, tensor)
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    members = [[i for i, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind] for kind in kinds]
    flats = [torch.cat([tensors[i].detach().reshape(-1) for i in group]) for group in members]

    def finish(_: object) -> list[torch.Tensor]:
        results = list(tensors)
        for flat, group in zip(flats, members, strict=True):
            for i, part in zip(group, flat.split([tensors[i].numel() for i in group]), strict=True):
                if in_place:
                    assign(tensors[i], part.view(tensors[i].shape))
                    stream.end_writing(tensors[i])
                else:
                    results[i] = part.view(tensors[i].shape)
        return results

    shapes = "; ".join(f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors)
    plan = reducing(stream, call, op, f"{len(tensors)} tensors: {shapes}", flats, finish)
    for tensor in tensors if in_place else ():
        stream.begin_writing(tensor)
    return plan


def reducing(
    stream: Calls, call: Call, op: ReduceOp, shape: str, flats: Tensors, finish: Callable[[object], Any]
) -> Plan:
    """Reduces `flats` in place; the result of the operation is `finish()`, once they are reduced and scaled."""
    prescale, postscale = float(call.prescale_factor), float(call.postscale_factor)
    word = op._value_
    divided = word == "avg" and not all(map(torch.is_floating_point, flats))
    layout = zip(map(_dtype, flats), map(torch.numel, flats), strict=True)
    what, flat_text = _described(shape, word, prescale, postscale, tuple(layout))

    def reduce(_: object) -> Sequence[Work]:
        works = []
        for flat in flats:
            if prescale != 1.0:
                scale(flat, prescale)
            works.append(stream.communicator.all_reduce(flat, engine_op(flat.dtype, word), async_op=True))
        return works

    def scaled(round: object) -> Any:
        for flat in flats if divided or postscale != 1.0 else ():
            if word == "avg" and not flat.dtype.is_floating_point:
                finish_average(flat, stream.size)
            scale(flat, postscale)
        return finish(round)

    return Plan(what, flat_text, word, 0, in_order(flats[0], reduce) if flats[0].is_cuda else reduce, scaled)


@functools.lru_cache(1024)
def _described(
    shape: str, word: str, prescale: float, postscale: float, layout: tuple[tuple[torch.dtype, int], ...]
) -> tuple[str, tuple[tuple[str, int], ...]]:
    """For messages, and to be compared between ranks."""
    dtype = f"{dtype_name(layout[0][0])} " if shape.startswith("(") else ""
    factors = "".join(
        f", {name}_factor={factor!r}"
        for name, factor in (("prescale", prescale), ("postscale", postscale))
        if factor != 1.0
    )
    what = f"{dtype}{shape}, op={ReduceOp(word).name}{factors}"
    return what, tuple((dtype_name(dtype), count) for dtype, count in layout)
