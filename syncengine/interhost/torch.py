"""Packets between hosts through torch.distributed.

The default communicator has a process group of its own, with the backend of torch's default group, if it has all of
that group's ranks. Other communicators are made in no agreed order, so they use that group, with separate tags.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

from syncengine._C import Backend, PacketTransport, torch_packet_transport
from syncengine.errors import InvalidUsage
from syncengine.interhost import Meet, agree_on_number

# Gloo takes every tag that c10d does, an int32 from 0 on; MPI promises no more than 32767, and others nothing.
_FIRST_TAG, _TAGS, _TAGS_OF_GLOO = 21090, 10_000, 2**31 - 21090


def open_torch(
    rank: int, global_ranks: list[int], in_order: bool, checksum: bool, silence: float, meet: Meet
) -> PacketTransport:
    """Opens a transport between `global_ranks` that sends over torch.distributed. See the package's docstring.

    `in_order`: all ranks of the job open it, and nothing else meanwhile, so it may make a process group of its own;
    otherwise it uses the default one. `silence`: seconds without a heartbeat after which a rank is lost.
    """
    backend = _backend()
    if max(global_ranks) >= dist.get_world_size():
        raise InvalidUsage(
            f"interhost='torch', but the default process group has {dist.get_world_size()} ranks, and this job "
            f"{max(global_ranks) + 1}: initialize torch.distributed with all ranks, or give interhost='tcp'"
        )
    number = agree_on_number(global_ranks, dist.get_world_size(), meet)
    group, closed = dist.distributed_c10d._get_default_group(), lambda: None
    if in_order and len(global_ranks) == dist.get_world_size():  # what new_group needs
        group = dist.new_group(backend=backend)
        closed = functools.partial(_destroy, group)
    tag = _FIRST_TAG + number % (_TAGS_OF_GLOO if backend == "gloo" else _TAGS)
    return torch_packet_transport(group, global_ranks, tag, closed, f"torch.distributed, {backend}", checksum, silence)


def _destroy(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(AssertionError, ValueError):  # the program has destroyed all groups
        dist.destroy_process_group(group)


def _backend() -> str:
    """The default group's backend for CPU tensors."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidUsage(
            "interhost='torch' needs an initialized torch.distributed: call "
            "torch.distributed.init_process_group('gloo') before syncengine.init(), or give interhost='tcp'"
        )
    group, device = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    if device not in group._device_types:
        raise InvalidUsage(
            "interhost='torch' needs a backend that moves CPU tensors, and the default process group has "
            f"{dist.get_backend()!r} alone: initialize it with 'cpu:gloo,cuda:nccl', or give interhost='tcp'"
        )
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if isinstance(backend, Backend):
        raise InvalidUsage(
            "interhost='torch', but the default process group is syncengine's own, which needs something else to reach "
            "other hosts by: give interhost='tcp'"
        )
    return backend.name()
