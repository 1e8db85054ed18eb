"""allreduce of one tensor or of several, and its variants."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncengine._C import Work
from syncengine.horovod.calls import Calls, apart
from syncengine.horovod.collective import Call, Tensors, perform, taking
from syncengine.horovod.reductions import ReduceOp, assign, check_reducible, engine_op, finish_average, in_order, scale
from syncengine.horovod.requests import Flat, dtype_name
from syncengine.horovod.streams import Plan, Round

_dtype, _shape, _is_cuda = map(operator.attrgetter, ("dtype", "shape", "is_cuda"))
_ARGUMENTS = "average name op prescale_factor postscale_factor process_set"
_COMPRESSED_ARGUMENTS = "average name compression op prescale_factor postscale_factor process_set"


@taking(_ARGUMENTS)
def allreduce_async(call: Call, tensor: torch.Tensor) -> int:
    """Starts to reduce a copy of `tensor` over all ranks; returns a handle for `poll` and `synchronize`.

    Shape, dtype, name and arguments are the same on all ranks. `op` is Average by default; `average` is its old form.
    Each rank's tensor is first multiplied by `prescale_factor`, the result by `postscale_factor`.
    """
    return perform(call, [tensor], reducing, _gradient)


@taking(_ARGUMENTS)
def allreduce_async_(call: Call, tensor: torch.Tensor) -> int:
    """Reduces in place, otherwise as `allreduce_async`; no other operation may use the tensor until `synchronize`."""
    return perform(call, [tensor], reducing, _gradient)


@taking(_COMPRESSED_ARGUMENTS)
def allreduce(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, which gradients flow through: the backward is an allreduce, too.

    `compression` chooses the dtype in which the tensor travels. Otherwise as `allreduce_async`.
    """
    return perform(call, [tensor], reducing, _gradient)


@taking(_ARGUMENTS)
def allreduce_(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Reduces `tensor` in place, and returns it. Otherwise as `allreduce_async`."""
    return perform(call, [tensor], reducing, _gradient)


@taking(_ARGUMENTS)
def grouped_allreduce_async(call: Call, tensors: Tensors) -> int:
    """Reduces several tensors as `allreduce_async` does, in one operation for each dtype; the result is a list."""
    return perform(call, tensors, reducing, _gradient)


@taking(_ARGUMENTS)
def grouped_allreduce_async_(call: Call, tensors: Tensors) -> int:
    """Reduces in place, otherwise as `grouped_allreduce_async`; nobody may use the tensors till `synchronize`."""
    return perform(call, tensors, reducing, _gradient)


@taking(_COMPRESSED_ARGUMENTS)
def grouped_allreduce(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Reduces several tensors as `allreduce` does, in one operation for each dtype."""
    return perform(call, tensors, reducing, _gradient)


@taking(_ARGUMENTS)
def grouped_allreduce_(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Reduces `tensors` in place, and returns them. Otherwise as `grouped_allreduce_async`."""
    return perform(call, tensors, reducing, _gradient)


def average_of(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    """Averages `tensors` over the ranks of `call`: for gradients of broadcast and allgather, as in Horovod."""
    kind = "grouped_allreduce" if call.grouped else "allreduce"
    return _gradient(Call(kind, process_set=call.process_set, grouped=call.grouped), *tensors)


def _gradient(call: Call, *gradients: torch.Tensor) -> list[torch.Tensor]:
    reduced: Any = perform(call.again(), gradients, reducing, _gradient)
    return reduced if call.grouped else [reduced]


def reducing(
    stream: Calls, call: Call, tensors: Tensors, part: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Plan:
    """Plans to reduce tensors, those of one dtype and device together. `part` cuts this rank's part from a result."""
    stream.check(call.kind, tensors)
    op = call.reduction()
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        check_reducible(call.kind, tensor, op)
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    values = [_together(members, call.in_place) for members in alike.values()]
    flats = list(map(torch.flatten, values))
    word, prescale, postscale = op._value_, float(call.prescale_factor), float(call.postscale_factor)
    shapes = tuple(zip(map(_dtype, tensors), map(_shape, tensors), strict=True))
    layout = tuple(zip(map(_dtype, flats), map(torch.numel, flats), strict=True))
    what, flat_text = _described(call.grouped, shapes, layout, word, prescale, postscale)

    def reduce(_: Round) -> Sequence[Work]:
        works = []
        for flat in flats:
            if prescale != 1.0:
                scale(flat, prescale)
            works.append(stream.communicator.all_reduce(flat, engine_op(flat.dtype, word), async_op=True))
        return works

    def finish() -> torch.Tensor | list[torch.Tensor]:
        parts = {}
        for (kind, members), reduced in zip(alike.items(), values, strict=True):
            if word == "avg" and not reduced.dtype.is_floating_point:
                finish_average(reduced, stream.size)
            if postscale != 1.0:
                scale(reduced, postscale)
            parts[kind] = iter([reduced] if len(members) == 1 else apart(reduced, members))
        results = []
        for tensor in tensors:
            result = next(parts[tensor.dtype, tensor.device])
            if call.in_place:
                if result.data_ptr() != tensor.data_ptr():
                    assign(tensor, result)
                result = tensor
            results.append(result if part is None else part(result))
        return results if call.grouped else results[0]

    return Plan(what, flat_text, word, 0, in_order(flats, reduce) if any(map(_is_cuda, flats)) else reduce, finish)


def _together(tensors: Tensors, in_place: bool) -> torch.Tensor:
    """A flat copy of tensors, to be written. One alone keeps its shape, and `in_place` its memory if contiguous."""
    if len(tensors) > 1:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    values = tensors[0].detach()
    if in_place and values.is_contiguous():
        return values
    return values.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(1024)
def _described(
    grouped: bool,
    tensors: tuple[tuple[torch.dtype, torch.Size], ...],
    layout: tuple[tuple[torch.dtype, int], ...],
    word: str,
    prescale: float,
    postscale: float,
) -> tuple[str, Flat]:
    """A text for messages, and the dtypes and sizes of the flat tensors: ranks compare both."""
    what = "; ".join(f"{dtype_name(dtype)} {tuple(shape)}" for dtype, shape in tensors)
    what = f"{len(tensors)} tensors: {what}" if grouped else what
    before = "" if prescale == 1.0 else f", prescale_factor={prescale!r}"
    after = "" if postscale == 1.0 else f", postscale_factor={postscale!r}"
    flat = tuple((dtype_name(dtype), count) for dtype, count in layout)
    return f"{what}, op={ReduceOp(word).name}{before}{after}", flat
