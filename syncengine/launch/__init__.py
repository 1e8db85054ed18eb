"""How this process was started, and how it reaches the other ranks before there is a communicator.

find_launch -> Launch                      this process's rank (environment.py, slurm.py)
open_exchange(launch) -> bytes to all      meet the others (store.py, mpi.py)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from syncengine.launch import slurm
from syncengine.launch.environment import Launch, detect
from syncengine.launch.variables import number, text

__all__ = ["Exchange", "Launch", "find_launch", "group_timeout", "launch_store", "open_exchange", "with_local_ranks"]


class Exchange(Protocol):
    """All-gather of small byte strings: takes this rank's, returns every rank's in rank order. At most 64 KiB each."""

    arrived: dict[int, bytes]  # in the last call, by rank; also if it raised

    def __call__(self, payload: bytes) -> list[bytes]:
        """Blocks until every rank has made the same call."""

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank has failed with `error`: they raise Aborted, or the error if it is theirs
        too."""

    def superseded(self) -> bool:
        """Whether a rank is known to have opened the next exchange of these ranks. Does not wait."""


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """An initialised torch.distributed takes precedence over all variables: the user has set the ranks there."""
    if dist.is_available() and dist.is_initialized():
        return Launch("torch.distributed", dist.get_rank(), dist.get_world_size())
    return detect(environ)


def open_exchange(
    launch: Launch, timeout: float, log_after: float, environ: Mapping[str, str] = os.environ, purpose: str = "init"
) -> Exchange:
    """The exchange with the other ranks of `launch`, which has at least two. Those that are open at the same time need
    a `purpose` each, and are opened in the same order on all ranks.

    Every call waits at most `timeout` seconds and raises Timeout naming the ranks that did not arrive; after
    `log_after` seconds one line is logged. Raises InvalidUsage if the way can't be opened on this rank.
    """
    if launch.kind == "mpi":
        from syncengine.launch.mpi import MPIExchange

        return MPIExchange(launch.rank, launch.world_size, timeout, log_after, purpose)
    from syncengine.launch.store import StoreExchange

    if launch.kind == "torch.distributed":
        store: dist.Store | None = dist.distributed_c10d._get_default_store()
    else:
        store = launch_store(launch, timeout, log_after, environ)
    assert store is not None  # there is none under MPI only
    return StoreExchange(store, launch.rank, launch.world_size, timeout, log_after, purpose=purpose)


def launch_store(
    launch: Launch, timeout: float, log_after: float, environ: Mapping[str, str] = os.environ
) -> dist.Store | None:
    """The store where the ranks of torchrun or of Slurm meet; None with other launchers."""
    from syncengine.launch import store

    if launch.kind == "slurm":
        host, port = slurm.master(environ)
    elif launch.kind == "torchrun":
        host, port = text(environ, "MASTER_ADDR", launch.kind), number(environ, "MASTER_PORT", launch.kind, 1, 65535)
    else:
        return None
    return store.open_store(host, port, launch.rank, launch.world_size, timeout, log_after)


def with_local_ranks(launch: Launch, hosts: list[str]) -> Launch:
    """`launch` with the local rank and size filled in from each rank's host, where the launcher did not say."""
    if launch.local_rank is not None:
        return launch
    own = hosts[launch.rank]
    return replace(launch, local_rank=Counter(hosts[: launch.rank])[own], local_world_size=Counter(hosts)[own])


def group_timeout(group: dist.ProcessGroup | None = None) -> float | None:
    """The timeout in seconds of a process group, or of the initialised default one; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.distributed_c10d._get_default_group()
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    seconds = min((option._timeout.total_seconds() for option in options if option is not None), default=None)
    return seconds if seconds is None else min(seconds, 1e9)
