"""The collective broadcast, and its variants."""

from __future__ import annotations

import torch

from syncengine.horovod.allreduce import average_of
from syncengine.horovod.calls import Calls, as_bytes
from syncengine.horovod.collective import Call, Tensors, perform, taking
from syncengine.horovod.process import rank
from syncengine.horovod.reductions import assign, in_order, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan


@taking("name process_set")
def broadcast_async(call: Call, tensor: torch.Tensor, root_rank: int) -> int:
    """Starts to copy rank `root_rank`'s `tensor`, of the same shape and dtype on all ranks, into a new one.

    Returns a handle for `poll` and `synchronize`.
    """
    return perform(call, [tensor], _prepare, None, root_rank)


@taking("name process_set")
def broadcast_async_(call: Call, tensor: torch.Tensor, root_rank: int) -> int:
    """Copies in place, otherwise as `broadcast_async`; no other operation may use the tensor until `synchronize`."""
    return perform(call, [tensor], _prepare, None, root_rank)


@taking("name process_set")
def broadcast(call: Call, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """A copy of rank `root_rank`'s `tensor`.

    Gradients flow through the copy: the root gets their average over all ranks, as in Horovod, the others get zeros.
    """

    def gradient(call: Call, of_copy: torch.Tensor) -> Tensors:
        reduced = average_of(call, [of_copy])
        return reduced if rank() == root_rank else list(map(torch.zeros_like, reduced))

    return perform(call, [tensor], _prepare, gradient, root_rank)


@taking("name process_set")
def broadcast_(call: Call, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Copies rank `root_rank`'s values into `tensor`, and returns it."""
    return perform(call, [tensor], _prepare, None, root_rank)


def _prepare(stream: Calls, call: Call, tensors: Tensors, root_rank: int) -> Plan:
    stream.check(call.kind, tensors)
    (tensor,) = tensors
    root = stream.root(call.kind, root_rank)
    values = plain(tensor)
    if not call.in_place and values.data_ptr() == tensor.data_ptr():
        values = values.clone()

    def finish() -> torch.Tensor:
        if not call.in_place:
            return values
        if values.data_ptr() != tensor.data_ptr() and stream.rank != root:
            assign(tensor, values)
        return tensor

    what = f"{describe(values)}, root_rank={root_rank}"
    work = in_order([values], lambda _: [stream.communicator.broadcast(as_bytes(values), root, async_op=True)])
    return Plan(what, how=str(root), begin=work, finish=finish)
