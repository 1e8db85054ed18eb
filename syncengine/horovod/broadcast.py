"""broadcast and its variants."""

from __future__ import annotations

from typing import Any

import torch

from syncengine.horovod.allreduce import allreduce
from syncengine.horovod.calls import as_bytes, bytes_request
from syncengine.horovod.collective import collective
from syncengine.horovod.handles import Operation, begin, synchronize
from syncengine.horovod.process import calls, rank
from syncengine.horovod.process_sets import check_process_set, global_process_set
from syncengine.horovod.reductions import Average, assign, check_dense, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Round


@collective
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = global_process_set
) -> int:
    """Starts to copy rank `root_rank`'s `tensor`, of the same shape and dtype on all ranks, into a new one.

    Returns a handle for `poll` and `synchronize`.
    """
    check_process_set("broadcast", process_set)
    check_dense("broadcast", tensor)
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _start(copy, copy, root_rank, name)


@collective
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = global_process_set
) -> int:
    """As `broadcast_async`, but in place."""
    check_process_set("broadcast", process_set)
    check_dense("broadcast", tensor)
    return _start(tensor, plain(tensor), root_rank, name)


@collective
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = global_process_set
) -> torch.Tensor:
    """A copy of rank `root_rank`'s `tensor`.

    Gradients flow through it: the root gets their average over all ranks, as in Horovod, the others zeros.
    """
    check_process_set("broadcast", process_set)
    copy: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-untyped-call]
    return copy


@collective
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = global_process_set
) -> torch.Tensor:
    """Copies rank `root_rank`'s values into `tensor`, and returns it."""
    written: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return written


def _start(tensor: torch.Tensor, values: torch.Tensor, root_rank: int, name: str | None) -> int:
    """Broadcasts `values`, which are contiguous, and returns them in `tensor`."""
    stream = calls()
    stream.check_root("broadcast", root_rank)
    what = f"{describe(values)}, root_rank={root_rank}"
    announcement = stream.announce(bytes_request("broadcast", name or "", what, values.nbytes, str(root_rank)))
    with announcement.explains():
        work = stream.communicator.broadcast(as_bytes(values), root_rank, async_op=True)

    def finish(round: Round) -> torch.Tensor:
        if root_rank in round.joined:
            stream.refuse_joined(round)
        if values.data_ptr() != tensor.data_ptr() and rank() != root_rank:
            assign(tensor, values)
        return tensor

    return begin(Operation(announcement, [work], finish, values))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        copy: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name))
        return copy

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        reduced = allreduce(grad_output, op=Average)
        return reduced if rank() == ctx.root_rank else torch.zeros_like(reduced), None, None
