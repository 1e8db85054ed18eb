"""Calls that all ranks of a process set make together, from their arguments to their results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls
from syncengine.horovod.compression import Compression, NoneCompressor
from syncengine.horovod.process_sets import ProcessSet, global_process_set, stream_of
from syncengine.horovod.reductions import Average, ReduceOp, Sum, choose_op
from syncengine.horovod.streams import Operation, Plan

Compressor = type[NoneCompressor]
_needs_gradient = operator.attrgetter("requires_grad")
Gradient = Callable[..., Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Call:
    """What a user has asked for, but for the tensors."""

    kind: str
    name: str | None = None
    process_set: ProcessSet | None = global_process_set
    op: ReduceOp | None = None
    average: bool | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none
    watched: bool = False  # it returns a handle, and must begin while the script does something else

    def reduction(self) -> ReduceOp:
        """What `op`, or the old `average`, means. Raises InvalidUsage for them and for the factors."""
        for factor in (self.prescale, self.postscale):
            if not isinstance(factor, (float, int)):
                raise InvalidUsage(f"{self.kind}: a factor of {factor!r} is no number")
        return choose_op(self.op, self.average)

    def numbered(self, number: int) -> Call:
        """The call for one tensor of a group."""
        name = None if self.name is None else f"{self.name}.{number}"
        return replace(self, name=name)

    def without_name(self) -> Call:
        """The same, to be made once more."""
        op = self.op if self.average is None else Average if self.average else Sum
        return Call(self.kind, None, self.process_set, op, None, self.prescale, self.postscale)


Prepare = Callable[..., Plan]  # of the stream, the call and its arguments; raises for what this rank can't do


def start(call: Call, prepare: Prepare, *arguments: Any) -> Operation:
    """Announces a call. What `prepare` raises, the other ranks raise, too."""
    stream, plan = _planned(call, prepare, arguments)
    return stream.submit(call.kind, call.name, plan, call.watched)


def through(call: Call, gradient: Gradient, prepare: Prepare, tensors: Sequence[torch.Tensor], *arguments: Any) -> Any:
    """The result of a call on `tensors`, which travel as its compression has it.

    Gradients flow through it: `gradient(result's gradients...)` are those of the tensors, as they travel.
    """
    if call.compression is not Compression.none:
        return _compressed(call, gradient, prepare, tensors, *arguments)
    stream, plan = _planned(call, prepare, (tensors, *arguments))
    if torch.is_grad_enabled() and any(map(_needs_gradient, tensors)):
        operation = stream.submit(call.kind, call.name, plan)
        return _Through.apply(operation, gradient, *tensors)  # type: ignore[no-untyped-call]
    return stream.submit(call.kind, call.name, plan).result()


def _planned(call: Call, prepare: Prepare, arguments: Sequence[Any]) -> tuple[Calls, Plan]:
    try:
        stream = stream_of(call.process_set, call.kind)
        if call.name is not None and not isinstance(call.name, str):
            raise InvalidUsage(f"{call.kind}: name={call.name!r} is no text")
        return stream, prepare(stream, call, *arguments)
    except Exception as error:
        stream_of(call.process_set if isinstance(call.process_set, ProcessSet) else None).refuse(
            error, call.kind, name=call.name
        )
        raise


def _compressed(
    call: Call, gradient: Gradient, prepare: Prepare, tensors: Sequence[torch.Tensor], *arguments: Any
) -> Any:
    compression = call.compression
    try:
        pairs = [compression.compress(tensor) for tensor in tensors]
    except Exception as error:
        stream_of(call.process_set).refuse(error, call.kind, name=call.name)
        raise
    result = through(
        replace(call, compression=Compression.none), gradient, prepare, [tensor for tensor, _ in pairs], *arguments
    )
    if isinstance(result, torch.Tensor):
        return compression.decompress(result, pairs[0][1])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(result, pairs, strict=True)]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, gradient: Gradient, *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        result = operation.result()
        return result if isinstance(result, torch.Tensor) else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.gradient(*gradients)
