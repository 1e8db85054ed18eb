"""Packets between hosts through torch.distributed: a process group of our own, like the default one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncengine._C import Backend, Mover, torch_mover
from syncengine.errors import InvalidUsage


def open_torch(global_ranks: list[int], checksum: bool, meet: Callable[[], object]) -> Mover:
    """See open_mover."""
    backend = _backend()
    if max(global_ranks) >= dist.get_world_size():
        raise InvalidUsage(
            f"interhost='torch', but the default process group has {dist.get_world_size()} ranks, and this job "
            f"{max(global_ranks) + 1}: initialize torch.distributed with all ranks, or give interhost='tcp'"
        )
    meet()
    everybody = len(global_ranks) == dist.get_world_size()
    group = dist.new_group(global_ranks, backend=backend, use_local_synchronization=not everybody)

    def closed() -> None:
        if (
            not everybody
        ):  # torch would give the next group of these ranks the same name, and find the old one's addresses
            return
        with contextlib.suppress(AssertionError, ValueError):  # the program has destroyed all groups
            dist.destroy_process_group(group)

    ranks = [dist.get_group_rank(group, rank) for rank in global_ranks]
    return torch_mover(group, ranks, closed, f"torch.distributed, {backend}", checksum)


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
