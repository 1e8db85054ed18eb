"""The ranks of a communicator as process groups of torch.distributed: Gloo's and syncengine's, as far as needed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage
from syncengine.launch import find_launch

_LONGEST = 300  # of a host's name and a port


class Groups:
    """While the `with` block runs. Collective."""

    def __init__(self, communicator: Communicator, gloo: bool, syncengine: bool, timeout: float) -> None:
        self.gloo: dist.ProcessGroup | None = None
        self.syncengine: dist.ProcessGroup | None = None
        self._own = False
        if not gloo and not syncengine:
            return
        if not communicator.links:  # all on one machine: it need not know itself by name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = timedelta(seconds=timeout)
        store = _open_store(communicator, limit)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=communicator.rank, world_size=communicator.size, timeout=limit
            )
        except RuntimeError as error:
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            remedy = "give GLOO_SOCKET_IFNAME the interface that reaches the other ranks, or leave --compare out"
            raise InvalidUsage(
                f"Gloo can't connect the ranks (GLOO_SOCKET_IFNAME is {interface or 'not set'}): "
                f"{str(error).splitlines()[0]}: {remedy}"
            ) from error
        self._own = True
        self.gloo = dist.group.WORLD if gloo else None
        self.syncengine = dist.new_group(backend="syncengine") if syncengine else None

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):  # type: ignore[no-untyped-def]
        if self._own and kind is None:
            dist.destroy_process_group()


def _open_store(communicator: Communicator, timeout: timedelta) -> dist.Store:
    """A store of rank 0's, at a port that is free."""
    name = "127.0.0.1"
    if communicator.links:
        name = socket.gethostname() if find_launch().kind == "mpi" else os.environ.get("MASTER_ADDR", "")
    store, place = None, torch.zeros(_LONGEST, dtype=torch.uint8, device="cpu")
    if communicator.rank == 0:
        store = dist.TCPStore(name, 0, communicator.size, is_master=True, timeout=timeout, wait_for_workers=False)
        text = f"{name} {store.port} ".encode()
        place[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    communicator.broadcast(place, 0)
    if store is None:
        host, port, _ = bytes(place.tolist()).decode().split(" ", 2)
        store = dist.TCPStore(
            host, int(port), communicator.size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    communicator.barrier()  # rank 0 may fail in what comes next, and end with its store
    return store
