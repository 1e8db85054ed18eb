"""Calls that all ranks of a process set make together, from their arguments to their results."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.process_sets import ProcessSet, global_process_set, refusing, stream_of
from syncengine.horovod.reductions import Average, Compression, NoneCompressor, ReduceOp, Sum
from syncengine.horovod.streams import Operation, Plan

Compressor = type[NoneCompressor]
Tensors = Sequence[torch.Tensor]
_needs_gradient = operator.attrgetter("requires_grad")
Gradient = Callable[..., Iterable[torch.Tensor]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, except for its tensors."""

    kind: str
    name: str | None = None
    process_set: ProcessSet | None = global_process_set
    op: ReduceOp | None = None
    average: bool | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Compressor = Compression.none
    watched: bool = False  # returns a handle, and must begin while the script goes on
    in_place: bool = False
    grouped: bool = False  # takes a list of tensors, and returns a list

    def reduction(self) -> ReduceOp:
        """The reduction that `op`, or the old `average`, asks for. Raises InvalidUsage for wrong values and factors."""
        for factor in (self.prescale_factor, self.postscale_factor):
            if not isinstance(factor, (float, int)):
                raise InvalidUsage(f"{self.kind}: a factor of {factor!r} is no number")
        if self.average is not None:
            if self.op is not None:
                raise InvalidUsage("op takes the place of average: give only one of them")
            warnings.warn("average= is deprecated in Horovod: give op=hvd.Average or op=hvd.Sum", DeprecationWarning, 7)
            return Average if self.average else Sum
        if self.op is not None and not isinstance(self.op, ReduceOp):
            raise InvalidUsage(f"op={self.op!r} is not one of hvd.Average, Sum, Min, Max, Product")
        return self.op or Average

    def again(self) -> Call:
        """The call, to be made once more in the backward: without its name, uncompressed."""
        op = self.op if self.average is None else Average if self.average else Sum
        return replace(self, name=None, op=op, average=None, compression=Compression.none)


def taking(order: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes a decorator that gives a function of a Call and tensors the signature of Horovod's function.

    In place of the Call, the decorated function takes the fields in `order`, after its other arguments. The function's
    name says what the call does: its kind, then `_async` if it returns a handle, `_` if it works in place.
    """
    names = order.split()
    defaults = {field.name: field.default for field in fields(Call)}

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        _, *about = signature.parameters.values()
        own = [parameter.name for parameter in about]
        kind, *watched = function.__name__.rstrip("_").split("_async")
        in_place, grouped = function.__name__.endswith("_"), own[0] == "tensors"
        variant: dict[str, Any] = {"watched": bool(watched), "in_place": in_place, "grouped": grouped}
        allowed = {*own, *names}

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Result:
            if len(given) > len(allowed) or not named.keys() <= allowed:
                raise TypeError(f"{function.__name__} takes {', '.join([*own, *names])}")
            of = {name: named.pop(name) for name in own if name in named}
            options = dict(zip(names, given[len(own) :], strict=False))
            return function(Call(kind, **variant, **options, **named), *given[: len(own)], **of)

        kept = [inspect.Parameter(name, about[0].kind, default=defaults[name]) for name in names]
        call.__signature__ = signature.replace(parameters=[*about, *kept])  # type: ignore[attr-defined]
        return call

    return decorate


Prepare = Callable[..., Plan]  # takes the stream, the call and its arguments; raises if this rank can't do it

_handles = itertools.count()  # numbers for operations that are under way
_pending: dict[int, Operation] = {}  # by handle
forget_handles = _pending.clear  # called when the communicator of all operations is gone


def start(call: Call, prepare: Prepare, *arguments: Any) -> Operation:
    """Announces a call. If `prepare` raises, the other ranks raise that, too."""
    try:
        stream = stream_of(call.process_set, call.kind)
        if call.name is not None and not isinstance(call.name, str):
            raise InvalidUsage(f"{call.kind}: name={call.name!r} is no text")
        plan = prepare(stream, call, *arguments)
    except Exception as error:  # `refusing` comes only now, since good calls would pay for it, too
        with refusing(call.process_set, call.kind, call.name):
            raise error
    return stream.submit(call.kind, call.name, plan, call.watched)


def perform(call: Call, tensors: Tensors, prepare: Prepare, gradient: Gradient | None, *arguments: Any) -> Result:  # type: ignore[type-var]
    """Makes a call on `tensors`, which travel in the dtype of its compression. Returns a handle, or the result.

    Gradients flow through a result: `gradient(call, result's gradients...)` returns the gradients of the tensors.
    """
    if call.compression is not Compression.none:
        return _compressed(call, tensors, prepare, gradient, *arguments)  # type: ignore[no-any-return]
    result: Any
    operation = start(call, prepare, tensors, *arguments)
    if call.in_place:
        stream_of(call.process_set).keep(operation, tensors)
    if call.watched:
        result = next(_handles)
        _pending[result] = operation
    elif gradient and not call.in_place and torch.is_grad_enabled() and any(map(_needs_gradient, tensors)):
        result = _Through.apply(operation, functools.partial(gradient, call), *tensors)  # type: ignore[no-untyped-call]
        result = list(result) if call.grouped else result
    else:
        result = operation.result()
    return result  # type: ignore[no-any-return]


def _compressed(call: Call, tensors: Tensors, prepare: Prepare, gradient: Gradient | None, *arguments: Any) -> Any:
    compression = call.compression
    with refusing(call.process_set, call.kind, call.name) as stream:
        stream.check(call.kind, tensors)
        pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    result: Any = perform(replace(call, compression=Compression.none), sent, prepare, gradient, *arguments)
    each = zip(result if call.grouped else [result], pairs, strict=True)
    whole = [compression.decompress(tensor, ctx) for tensor, (_, ctx) in each]
    return whole if call.grouped else whole[0]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, gradient: Gradient, *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        result = operation.result()
        return result if isinstance(result, torch.Tensor) else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.gradient(*gradients)


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that `synchronize(handle)` would not block."""
    return _find(handle).is_completed()


def synchronize(handle: int) -> Any:
    """Blocks until the operation has ended; returns its result, and gives up the handle.

    Raises the operation's error; Mismatch if the ranks' calls differ; InvalidUsage for a handle that was synchronized.
    """
    operation = _find(handle)
    del _pending[handle]
    return operation.result()


def _find(handle: int) -> Operation:
    operation = _pending.get(handle) if isinstance(handle, int) else None
    if operation is None:
        raise InvalidUsage(
            f"{handle!r} is no handle, or was synchronized before, or is older than the last init(): call "
            "synchronize() once for what each hvd.*_async() call has returned, and keep the result"
        )
    return operation
