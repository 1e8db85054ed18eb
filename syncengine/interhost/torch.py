"""Packets between hosts through torch.distributed, and CUDA tensors by its NCCL.

For the default communicator a separate process group is used, made like torch's default one; for those of other groups,
which come in no agreed order, the default one, with separate tags.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

from syncengine._C import Backend, PacketTransport, has_cuda, torch_packet_transport
from syncengine.errors import InvalidUsage
from syncengine.interhost import Meet, agree_on_number

logger = logging.getLogger("syncengine")

_FIRST_TAG, _TAGS = 21090, 10_000


def open_torch(
    rank: int, global_ranks: list[int], in_order: bool, checksum: bool, silence: float, meet: Meet
) -> PacketTransport:
    """See the package. `in_order`: all ranks of the job open it, and nothing else meanwhile.

    `silence`: seconds without a heartbeat after which a rank is lost.
    """
    backend = _backend()
    if max(global_ranks) >= dist.get_world_size():
        raise InvalidUsage(
            f"interhost='torch', but the default process group has {dist.get_world_size()} ranks, and this job "
            f"{max(global_ranks) + 1}: initialize torch.distributed with all ranks, or give interhost='tcp'"
        )
    number = agree_on_number(global_ranks, dist.get_world_size(), meet)
    group, closed = dist.distributed_c10d._get_default_group(), _nothing
    open_nccl = _nccl_opener(rank, global_ranks)
    if has_cuda:
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "CUDA tensors between hosts go %s",
            "through pinned memory" if open_nccl is None else "by nccl",
        )
    if in_order and len(global_ranks) == dist.get_world_size():  # what new_group needs
        group = dist.new_group(backend=backend)
        closed = functools.partial(_destroy, group)
    tag = _FIRST_TAG + number % _TAGS
    return torch_packet_transport(
        group, global_ranks, tag, closed, f"torch.distributed, {backend}", checksum, silence, open_nccl
    )


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
    backend = _backend_for("cpu")
    if backend is None:
        raise InvalidUsage(
            "interhost='torch' needs a backend that moves CPU tensors, and the default process group has "
            f"{dist.get_backend()!r} alone: initialize it with 'cpu:gloo,cuda:nccl', or give interhost='tcp'"
        )
    if isinstance(backend, Backend):
        raise InvalidUsage(
            "interhost='torch', but the default process group is syncengine's own, which needs something else to reach "
            "other hosts by: give interhost='tcp'"
        )
    return backend.name()


def _backend_for(kind: str) -> C10dBackend | None:
    """What the default group moves tensors of a kind of device by."""
    group, device = dist.distributed_c10d._get_default_group(), torch.device(kind)
    if device not in group._device_types:
        return None
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL


def _nccl_opener(rank: int, global_ranks: list[int]) -> Callable[[list[int], str], C10dBackend] | None:
    """What makes groups of NCCL for CUDA tensors; None if the default group has none, or this build no CUDA side.

    Not by new_group: that registers them, so that destroy_process_group() without arguments would end them, and where
    the default group is bound to a device it splits that one's communicator, with all ranks.
    """
    backend = _backend_for("cuda") if has_cuda else None
    if backend is None or backend.name() != "nccl":
        return None
    nccl, store = dist.ProcessGroupNCCL, dist.distributed_c10d._get_default_store()

    def open_nccl(ranks: list[int], name: str) -> C10dBackend:
        options = nccl.Options()
        options._timeout = timedelta(days=1)  # the engine has deadlines of its own
        options.is_high_priority_stream = True
        options.global_ranks_in_group = [global_ranks[member] for member in ranks]
        options.group_name = cast("dist.distributed_c10d.GroupName", f"syncengine-{name}")
        with _errors_left_to_us():
            return nccl(dist.PrefixStore(options.group_name, store), ranks.index(rank), len(ranks), options)

    return open_nccl


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """NCCL's own watchdog ends the process when a peer is lost, unless this is set when its group is made."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
