"""Packets between hosts through torch.distributed.

All ranks use a process group of our own, like the default one; some of them, the default one, with tags of our own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncengine._C import Backend, Mover, torch_mover
from syncengine.errors import InvalidUsage

_FIRST_TAG, _TAGS = 21090, 10_000
_next_tag = 0


def open_torch(global_ranks: list[int], checksum: bool, meet: Callable[[bytes], list[bytes]]) -> Mover:
    """See open_mover."""
    global _next_tag
    backend = _backend()
    if max(global_ranks) >= dist.get_world_size():
        raise InvalidUsage(
            f"interhost='torch', but the default process group has {dist.get_world_size()} ranks, and this job "
            f"{max(global_ranks) + 1}: initialize torch.distributed with all ranks, or give interhost='tcp'"
        )
    number = max(int(answer) for answer in meet(str(_next_tag).encode()))  # which none of these ranks has used
    _next_tag = number + 1
    group, closed = dist.distributed_c10d._get_default_group(), _nothing
    if len(global_ranks) == dist.get_world_size():  # else new_group would need the other ranks, too
        group = dist.new_group(backend=backend)
        closed = functools.partial(_destroy, group)
    tag = _FIRST_TAG + number % _TAGS
    return torch_mover(group, global_ranks, tag, closed, f"torch.distributed, {backend}", checksum)


def _nothing() -> None:
    pass


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
    group, cpu = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    if cpu not in group._device_types:
        raise InvalidUsage(
            "interhost='torch' needs a backend that moves CPU tensors, and the default process group has "
            f"{dist.get_backend()!r} alone: initialize it with 'cpu:gloo,cuda:nccl', or give interhost='tcp'"
        )
    backend = group._get_backend(cpu)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if isinstance(backend, Backend):
        raise InvalidUsage(
            "interhost='torch', but the default process group is syncengine's own, which needs something else to reach "
            "other hosts by: give interhost='tcp'"
        )
    return backend.name()
