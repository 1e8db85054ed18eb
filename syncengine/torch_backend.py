"""The torch.distributed backend "syncengine".

It is registered when torch is imported (syncengine_autoload) and again when syncengine is. A group makes its backend.

torch.distributed.init_process_group("syncengine")  # or "cpu:syncengine,cuda:nccl"
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from syncengine._C import Backend, Communicator, has_cuda
from syncengine.communicator import install_hooks, refuse_forked_child
from syncengine.config import DEFAULT_LOG_AFTER, DEFAULT_TIMEOUT, Config
from syncengine.connect import GROUP_TIMEOUT, connect
from syncengine.errors import InvalidUsage, SyncError
from syncengine.launch.store import StoreExchange

NAME = "syncengine"


def register() -> None:
    """Registers the backend with torch.distributed: for CPU tensors, and for CUDA tensors if this build has CUDA."""
    devices = ["cpu", "cuda"] if has_cuda else ["cpu"]
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)
    make = getattr(dist.distributed_c10d, "_create_shrunk_process_group", None)
    if make is not None and not hasattr(make, "__wrapped__"):
        dist.distributed_c10d._create_shrunk_process_group = _as_custom(make)


def _as_custom(make: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
    """Mends groups that `dist.shrink_group` makes: torch takes them for Gloo's, and calls what only Gloo has."""

    @functools.wraps(make)
    def make_shrunk(new_backend: Any, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        group = make(new_backend, *args, **kwargs)
        if isinstance(new_backend, Backend):
            custom = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), custom, new_backend)
            group._set_default_backend(custom)
        return group

    return make_shrunk


def create(
    options: Any,
    backend_options: Any,
    call: str = "call init_process_group or new_group",
    lost: Callable[[], str] | None = None,
    timeout_call: str = GROUP_TIMEOUT,
) -> Backend:
    """Makes the backend of one process group, whose ranks meet through the group's store. torch calls it.

    `call` names, in errors, the call that a missing rank has not made. `lost` is as in StoreExchange, `timeout_call` as
    in connect().

    Settings come from SYNCENGINE_* variables, but the timeout is the group's, if torch was given one (not its default),
    or a shorter one in pg_options of another syncengine group. Raises InvalidUsage for options of other backends, and
    for a rank that the group does not have.
    """
    refuse_forked_child()
    if isinstance(backend_options, Communicator):  # init(torch_group=True) makes the group
        return Backend(backend_options)
    rank, size, global_ranks = options.group_rank, options.group_size, list(options.global_ranks_in_group)
    if not 0 <= rank < size:
        raise InvalidUsage(
            f"rank {rank} is not in 0..{size - 1}, the ranks of a process group of {size}: give every process the "
            "number of all of them as world_size (WORLD_SIZE), and its own rank below that (RANK)"
        )
    global_ranks = global_ranks or list(range(size))  # as torch leaves it for the group of all ranks

    def open_exchange(timeout: float, log_after: float) -> StoreExchange:
        return StoreExchange(options.store, rank, size, timeout, log_after, global_ranks, call, lost=lost)

    try:
        config = _settings(options, backend_options)
    except SyncError as error:
        if size > 1:
            open_exchange(DEFAULT_TIMEOUT, DEFAULT_LOG_AFTER).fail(error)
        raise
    timeout = config.timeout or DEFAULT_TIMEOUT
    exchange = None if size == 1 else open_exchange(timeout, config.log_after)
    connection = connect(exchange, rank, size, config, timeout, global_ranks, timeout_call=timeout_call)
    install_hooks()
    return Backend(connection.communicator)


def _settings(options: Any, backend_options: Any) -> Config:
    config = Config.read(os.environ)
    timeout: float = options.timeout.total_seconds()
    if config.timeout is not None and options.timeout == default_pg_timeout:  # nobody has given one
        timeout = config.timeout
    if backend_options is not None:
        if getattr(backend_options, "backend", None) != NAME:
            kind = type(backend_options).__qualname__
            raise InvalidUsage(
                f"pg_options of type {kind} are another backend's: leave them out, since syncengine is configured by "
                "SYNCENGINE_* variables and timeout="
            )
        timeout = min(timeout, backend_options._timeout.total_seconds())
    if timeout <= 0:
        raise InvalidUsage(f"a process group's timeout of {timeout:g} s is not allowed: give more than 0")
    return replace(config, timeout=min(timeout, 1e9))
