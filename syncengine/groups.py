"""A communicator over exactly the ranks of a torch.distributed process group."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from syncengine._C import Backend, Communicator
from syncengine.config import DEFAULT_TIMEOUT, Config
from syncengine.connect import connect
from syncengine.errors import InvalidUsage
from syncengine.launch import Exchange, group_timeout
from syncengine.launch.store import StoreExchange

# One for each group for as long as the group is there.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()


def backend_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The communicator below `group`, where its CPU tensors are syncengine's."""
    if torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend.communicator if isinstance(backend, Backend) else None


def communicator_of(group: dist.ProcessGroup, config: Config) -> Communicator:
    """The communicator of the ranks of `group`, made with the first call: collective over the group, and only over it.

    Raises InvalidUsage if this rank is not one of them.
    """
    communicator = _communicators.get(group)
    if communicator is None:
        if dist.get_rank(group) < 0:
            raise InvalidUsage("this rank is not in the process group: call this on the group's ranks only")
        timeout = config.timeout or group_timeout(group) or DEFAULT_TIMEOUT
        rank, global_ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        exchange = None if len(global_ranks) == 1 else _open_exchange(group, rank, global_ranks, timeout, config)
        communicator, _ = connect(exchange, rank, len(global_ranks), config, timeout, global_ranks)
        _communicators[group] = communicator
    return communicator


def all_group_communicators() -> list[Communicator]:
    """Those that communicator_of() made."""
    return list(_communicators.values())


def forget_groups() -> None:
    """The next communicator_of() makes new ones."""
    _communicators.clear()


def _open_exchange(
    group: dist.ProcessGroup, rank: int, global_ranks: list[int], timeout: float, config: Config
) -> Exchange:
    store = dist.distributed_c10d._world.pg_map[group][1]
    if store is None:  # not every backend has one
        return GroupExchange(group)
    call = "wrap its model in syncengine.Parallel"
    return StoreExchange(store, rank, len(global_ranks), timeout, config.log_after, global_ranks, call)


class GroupExchange:
    """An Exchange by the group's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, payload: bytes) -> list[bytes]:
        """See Exchange."""
        answers: list[bytes | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(answers, payload, group=self._group)
        return answers

    def fail(self, error: BaseException) -> None:
        """Nothing can be told but by the collective that the others wait in: the group's timeout ends it."""
