"""Collectives on the default communicator. Each returns None, or with `async_op` a Work to wait on."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from syncengine._C import Work
from syncengine.communicator import default_communicator
from syncengine.config import Op
from syncengine.errors import InvalidUsage


@overload
def all_reduce(tensor: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False) -> None: ...
@overload
def all_reduce(tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
@overload
def all_reduce(tensor: torch.Tensor, op: Op = "sum", async_op: bool = False) -> Work | None: ...
def all_reduce(tensor: torch.Tensor, op: Op = "sum", async_op: bool = False) -> Work | None:
    """Replaces `tensor` (any shape and strides) on every rank by the reduction over all ranks.

    `op`: "sum", "avg" (floating dtypes), "product", "min", "max". Shape, strides (of tensors without gaps), dtype and
    `op` must be the same on all ranks. Returns a Work to wait on if `async_op`, else waits. Raises InvalidUsage,
    Mismatch, Timeout, PeerLost, Aborted.
    """
    return default_communicator().all_reduce(tensor, op, async_op)


@overload
def broadcast(tensor: torch.Tensor, src: int, async_op: Literal[False] = False) -> None: ...
@overload
def broadcast(tensor: torch.Tensor, src: int, async_op: Literal[True]) -> Work: ...
@overload
def broadcast(tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None: ...
def broadcast(tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
    """Copies rank `src`'s `tensor` into that of every rank. Otherwise as `all_reduce`."""
    return default_communicator().broadcast(tensor, src, async_op)


@overload
def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False
) -> None: ...
@overload
def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
@overload
def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Op = "sum", async_op: bool = False
) -> Work | None: ...
def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: Op = "sum", async_op: bool = False) -> Work | None:
    """Reduces `input` over all ranks; rank r gets the r-th of world_size equal parts of it in `output`.

    `input` has world_size times as many elements as `output`. Otherwise as `all_reduce`.
    """
    return default_communicator().reduce_scatter(output, input, op, async_op)


@overload
def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: Literal[False] = False) -> None: ...
@overload
def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: Literal[True]) -> Work: ...
@overload
def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None: ...
def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
    """Puts every rank's `input`, in rank order, into `output` on every rank.

    `output` has world_size times as many elements as `input`. Otherwise as `all_reduce`.
    """
    return default_communicator().all_gather(output, input, async_op)


@overload
def barrier(async_op: Literal[False] = False, device: torch.device | str | None = None) -> None: ...
@overload
def barrier(async_op: Literal[True], device: torch.device | str | None = None) -> Work: ...
@overload
def barrier(async_op: bool = False, device: torch.device | str | None = None) -> Work | None: ...
def barrier(async_op: bool = False, device: torch.device | str | None = None) -> Work | None:
    """Blocks until every rank has called it; with a CUDA `device`, its current stream waits instead.

    `async_op` and errors are as for `all_reduce`.
    """
    return default_communicator().barrier(async_op, None if device is None else torch.device(device))


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """An uninitialized tensor in memory that the other ranks of this host can read: collectives on it copy nothing.

    `size` is as for torch.empty; `dtype` None is torch's default dtype; `device` is a CPU or a CUDA device. With a CUDA
    device, all ranks make the same tensors in the same order.
    """
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise InvalidUsage(f"device={str(device)!r} is not allowed: give a CPU or a CUDA device")
    sizes: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    where = None if device is None else torch.device(device)
    return default_communicator().empty(list(sizes), dtype or torch.get_default_dtype(), where)
