"""broadcast and its variants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncengine.horovod.allreduce import average_of
from syncengine.horovod.calls import Calls, as_bytes
from syncengine.horovod.collective import Call, start, through
from syncengine.horovod.handles import begin
from syncengine.horovod.process import rank
from syncengine.horovod.process_sets import ProcessSet, global_process_set
from syncengine.horovod.reductions import assign, check_dense, in_order, plain
from syncengine.horovod.requests import describe
from syncengine.horovod.streams import Plan


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> int:
    """Starts to copy rank `root_rank`'s `tensor`, of the same shape and dtype on all ranks, into a new one.

    Returns a handle for `poll` and `synchronize`.
    """
    return begin(start(Call("broadcast", name, process_set, watched=True), _prepare, [tensor], root_rank))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> int:
    """As `broadcast_async`, but in place; no other operation may use the tensor until `synchronize`."""
    return begin(start(Call("broadcast", name, process_set, watched=True), _prepare, [tensor], root_rank, True))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> torch.Tensor:
    """A copy of rank `root_rank`'s `tensor`.

    Gradients flow through it: the root gets their average over all ranks, as in Horovod, the others zeros.
    """
    call = Call("broadcast", name, process_set)

    def gradient(of_copy: torch.Tensor) -> Sequence[torch.Tensor]:
        reduced = average_of(call, of_copy)
        return [reduced if rank() == root_rank else torch.zeros_like(reduced)]

    copy: torch.Tensor = through(call, gradient, _prepare, [tensor], root_rank)
    return copy


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> torch.Tensor:
    """Copies rank `root_rank`'s values into `tensor`, and returns it."""
    written: torch.Tensor = start(Call("broadcast", name, process_set), _prepare, [tensor], root_rank, True).result()
    return written


def _prepare(
    stream: Calls, call: Call, tensors: Sequence[torch.Tensor], root_rank: int, in_place: bool = False
) -> Plan:
    (tensor,) = tensors
    check_dense(call.kind, tensor)
    stream.check_free(call.kind, tensor)
    root = stream.root(call.kind, root_rank)
    values = plain(tensor)
    if not in_place and values.data_ptr() == tensor.data_ptr():
        values = values.clone()

    def finish(_: object) -> torch.Tensor:
        if not in_place:
            return values
        if values.data_ptr() != tensor.data_ptr() and stream.rank != root:
            assign(tensor, values)
        stream.end_writing(tensor)
        return tensor

    if in_place:
        stream.begin_writing(tensor)
    what = f"{describe(values)}, root_rank={root_rank}"
    work = in_order(values, lambda _: [stream.communicator.broadcast(as_bytes(values), root, async_op=True)])
    return Plan(what, (("uint8", values.nbytes),), str(root), 0, work, finish)
