"""What a forward returns: the tensors in it, and the sink through which their gradients come back."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import rpc
from torch.utils._pytree import tree_flatten, tree_unflatten

_has_rpc = rpc.is_available()


def through_sink(output: Any, clone: bool) -> Any:
    """Makes every output take part in backward, so that hooks of parameters behind an unused one still run."""
    referenced = _is_rref(output)
    leaves, spec = tree_flatten(output.local_value() if referenced else output)
    passed = _OutputSink.apply(clone, *leaves)  # type: ignore[no-untyped-call]
    # What has no graph stays the very object it was.
    leaves = [
        leaf if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None else new
        for leaf, new in zip(leaves, passed, strict=True)
    ]
    output = tree_unflatten(leaves, spec)
    return rpc.RRef(output) if referenced else output


def _is_rref(value: Any) -> bool:
    """Whether it is a reference of ``torch.distributed.rpc``."""
    return _has_rpc and isinstance(value, rpc.RRef)


class _OutputSink(torch.autograd.Function):
    """Passes tensors through; backward passes missing gradients on as missing, so that their graphs run as well."""

    @staticmethod
    def forward(ctx: Any, clone: bool, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        # Cloned, since a user may change an output in place, which a view out of a custom function does not allow.
        return tuple(v.clone() if clone and isinstance(v, torch.Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an output: in lists, tuples, mappings, dataclasses and local RRefs, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif _is_rref(value) and value.is_owner():
        yield from tensors_in(value.local_value())
