"""Communicators over exactly the ranks of a torch.distributed process group."""

import os
import threading
import weakref

import torch
import torch.distributed as dist

from syncengine._C import Backend, Communicator
from syncengine.config import DEFAULT_TIMEOUT, Config
from syncengine.connect import Connection, connect
from syncengine.errors import InvalidUsage, SyncError
from syncengine.launch import group_timeout
from syncengine.launch.store import StoreExchange


class _Own:
    """The lock and the connection of one process group, for as long as the group is there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while its ranks meet; other groups may meet meanwhile, in any order
        self.connection: Connection | None = None


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Own] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # guards the table


def backend_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The communicator below `group`, if its backend for CPU tensors is syncengine; else None."""
    if torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend.communicator if isinstance(backend, Backend) else None


def existing_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The communicator of the ranks of `group`, if it is there already. Does not communicate."""
    with _lock:
        own = _groups.get(group)
    connection = None if own is None else own.connection
    return backend_communicator(group) if connection is None else connection.communicator


def communicator_of(group: dist.ProcessGroup, config: Config | None) -> Communicator:
    """The communicator of the ranks of `group`, and only these ranks call it. `config`: None for the environment's.

    The first call makes the communicator, and the first one after it has failed makes another. Threads may call this
    for different groups at a time, in another order on each rank.

    Raises InvalidUsage if this rank is not in the group.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidUsage("this rank is not in the process group: call this on the group's ranks only")
    with _lock:
        own = _groups.setdefault(group, _Own())
    with own.lock:
        connection = own.connection
        if connection is None or connection.has_failed():
            global_ranks = dist.get_process_group_ranks(group)
            try:
                config = config or Config.read(os.environ)
            except SyncError as error:
                if len(global_ranks) > 1:
                    _open_exchange(group, rank, global_ranks, DEFAULT_TIMEOUT, Config()).fail(error)
                raise
            timeout = config.timeout or group_timeout(group) or DEFAULT_TIMEOUT
            exchange = None if len(global_ranks) == 1 else _open_exchange(group, rank, global_ranks, timeout, config)
            connection = connect(exchange, rank, len(global_ranks), config, timeout, global_ranks)
            own.connection = connection
        return connection.communicator


def all_group_communicators() -> list[Communicator]:
    """The communicators that communicator_of() has made."""
    with _lock:
        connections = [own.connection for own in _groups.values()]
    return [connection.communicator for connection in connections if connection is not None]


def forget_groups() -> None:
    """Forgets all communicators of groups: the next communicator_of() makes new ones."""
    with _lock:
        for own in _groups.values():
            own.connection = None


def _open_exchange(
    group: dist.ProcessGroup, rank: int, global_ranks: list[int], timeout: float, config: Config
) -> StoreExchange:
    store = dist.distributed_c10d._world.pg_map[group][1]
    call = "wrap its model in syncengine.Parallel"
    return StoreExchange(store, rank, len(global_ranks), timeout, config.log_after, global_ranks, call, "group")
