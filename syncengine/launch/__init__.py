"""Finds out how this process was started, and meets the other ranks before there is a communicator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist

from syncengine.config import DEFAULT_LOG_AFTER
from syncengine.errors import SyncError
from syncengine.launch import mpi, slurm
from syncengine.launch.environment import Launch as Launch
from syncengine.launch.environment import detect
from syncengine.launch.variables import number, text

_REACHED_WITHIN = 30.0  # seconds

_RANK_PROCESS = "_SYNCENGINE_RANK_PROCESS"
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Exchange(Protocol):
    """An all-gather of byte strings of up to 64 KiB: takes this rank's, returns every rank's in rank order."""

    arrived: dict[int, bytes]  # in the last call, by rank; also if it raised

    def __call__(self, payload: bytes) -> list[bytes]:
        """Blocks until every rank has made the same call."""

    def fail(self, error: BaseException, where: str = "in init", to_come: bool = False) -> None:
        """Tells the other ranks that this rank has failed with `error`.

        In their calls, now and later, they raise Aborted, or `error` itself if it concerns all ranks. `where` completes
        "rank 3 failed ...". With `to_come` a process that serves the store ends only when ranks that have not come yet
        have heard of the error as well, or after 30 s. In init, an Aborted of another rank implies `to_come`.
        """

    def check(self) -> None:
        """Raises between calls what a call would raise, if a rank has failed. Does not wait."""

    def superseded(self) -> bool:
        """Whether a rank is known to have left this exchange, as it has opened the ranks' next one. Does not wait."""


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process. An initialised torch.distributed comes before all variables: the user has set it."""
    if dist.is_available() and dist.is_initialized():
        return Launch("torch.distributed", dist.get_rank(), dist.get_world_size())
    return detect(environ)


def open_exchange(
    launch: Launch, timeout: float, log_after: float, environ: Mapping[str, str] = os.environ, purpose: str = "init"
) -> Exchange:
    """Opens the exchange with the other ranks of `launch`, which has at least two.

    Exchanges that are open at the same time need a `purpose` each, and are opened in the same order on all ranks. Every
    call waits at most `timeout` seconds and raises Timeout naming the ranks that did not arrive; after `log_after`
    seconds one line is logged. Raises InvalidUsage if the exchange can't be opened on this rank.
    """
    if launch.kind == "mpi":
        return mpi.MPIExchange(launch.rank, launch.world_size, timeout, log_after, purpose)
    from syncengine.launch.store import StoreExchange

    by_user = launch.kind == "torch.distributed"
    store = dist.distributed_c10d._get_default_store() if by_user else launch_store(launch, timeout, log_after, environ)
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


def mark_rank_process() -> None:
    """Notes a rank's process id in its environment: children, which inherit the launcher's variables, are no ranks."""
    if any(name in os.environ for name in _RANKS):
        os.environ.setdefault(_RANK_PROCESS, str(os.getpid()))


def tell_failure(error: BaseException, where: str, in_init: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Lets the other ranks of this launch raise `error`, which keeps this rank from connecting, in their init().

    `where` completes "rank 3 failed ...". `in_init`: whether this rank has called init(). Does nothing where this rank
    can't reach the others: if the variables name no rank, or if rank 0, which has the store, does not come within 30 s.
    Outside of init() it does nothing either if MPI has not begun here (then mpirun ends all ranks with this one), or if
    this process is a child of a rank.
    """
    if not in_init and environ.get(_RANK_PROCESS, str(os.getpid())) != str(os.getpid()):
        return
    by_mpi = in_init or mpi.is_running()
    if not by_mpi:
        environ = {name: value for name, value in environ.items() if name != "PMIX_RANK"}  # which asks MPI
    with contextlib.suppress(SyncError, dist.DistError):
        launch = find_launch(environ)
        if launch.world_size > 1 and (launch.kind != "mpi" or by_mpi):
            exchange = open_exchange(launch, _REACHED_WITHIN, DEFAULT_LOG_AFTER, environ)
            exchange.fail(error, where, to_come=launch.kind != "torch.distributed")


def group_timeout(group: dist.ProcessGroup | None = None) -> float | None:
    """The timeout in seconds of a process group, or of the initialised default one; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.distributed_c10d._get_default_group()
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    seconds = min((option._timeout.total_seconds() for option in options if option is not None), default=None)
    return seconds if seconds is None else min(seconds, 1e9)
