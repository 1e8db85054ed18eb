"""The outputs of a forward, and the sink through which their gradients come back."""

from typing import Any

import torch
from torch.nn.parallel.distributed import _tree_flatten_with_rref, _tree_unflatten_with_rref


def through_sink(output: Any, clone: bool) -> Any:
    """Makes every output take part in backward, so that hooks of parameters behind an unused one still run."""
    leaves, spec, is_reference = _tree_flatten_with_rref(output)
    passed = _OutputSink.apply(clone, *leaves)  # type: ignore[no-untyped-call]
    # A tensor without a graph stays the very object it was.
    leaves = [
        leaf if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None else new
        for leaf, new in zip(leaves, passed, strict=True)
    ]
    return _tree_unflatten_with_rref(leaves, spec, is_reference)


class _OutputSink(torch.autograd.Function):
    """Passes tensors through. Backward passes None on for unused ones, so that their graphs run as well."""

    @staticmethod
    def forward(ctx: Any, clone: bool, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        # Outputs are cloned, since a user may change them in place, which views out of a custom function do not allow.
        return tuple(v.clone() if clone and isinstance(v, torch.Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)
