"""The default process group of torch.distributed that init(torch_group=True) makes, and shutdown() destroys.

Its backend is a split of the default communicator: the same connections and settings. Its store is the launcher's where
there is one; under MPI rank 0 serves one.
"""

import json
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.connect import reachable_address
from syncengine.errors import InvalidUsage, error_text, name_ranks
from syncengine.groups import backend_communicator
from syncengine.launch import Launch, launch_store
from syncengine.launch.store import serve_store
from syncengine.launch.variables import number

_MOST_BYTES = 4096  # of what rank 0 tells
_CONNECTING = timedelta(seconds=30)

_NONE, _OURS, _THEIRS = range(3)  # a group of ours that has failed, or is another communicator's, counts as none

_group: weakref.ReferenceType[dist.ProcessGroup] | None = None
_parent: weakref.ReferenceType[Communicator] | None = None  # the default communicator it is a split of

_served: list[dist.Store] = []  # until the process ends: the others may still be reading


def ensure_torch_group(communicator: Communicator, launch: Launch, log_after: float) -> None:
    """Makes torch's default group, unless it is there and works; keeps a user's. All ranks of `communicator` call it.

    Raises InvalidUsage on all ranks if torch.distributed is initialized on some of them only.
    """
    gathered = torch.empty(communicator.size, dtype=torch.uint8, device="cpu")
    communicator.all_gather(gathered, torch.tensor([_state(communicator)], dtype=torch.uint8, device="cpu"))
    states = gathered.tolist()
    theirs = {rank for rank, state in enumerate(states) if state == _THEIRS}
    if theirs and len(theirs) < len(states):
        raise InvalidUsage(
            f"init(torch_group=True): torch.distributed is initialized on {name_ranks(theirs)}, but not on "
            f"{name_ranks(set(range(len(states))) - theirs)}: initialize it on all ranks, or on none"
        )
    if theirs or all(state == _OURS for state in states):
        return
    destroy_torch_group()
    _make(communicator, _shared_store(communicator, launch, log_after))


def destroy_torch_group() -> None:
    """Destroys the group that init() made, with the groups made from it. Does nothing to a group of the user's."""
    global _group
    group, _group = _group() if _group is not None else None, None
    if group is not None and default_group() is group:
        dist.destroy_process_group()


def is_made() -> bool:
    """Whether torch.distributed's default group is one that init() has made."""
    return default_group() is not None and users_group() is None


def users_group() -> dist.ProcessGroup | None:
    """torch.distributed's default group, unless there is none, or init() has made it."""
    group = default_group()
    return None if group is None or (_group is not None and _group() is group) else group


def default_group() -> dist.ProcessGroup | None:
    """torch.distributed's default group, if there is one."""
    there = dist.is_available() and dist.is_initialized()
    return dist.distributed_c10d._get_default_group() if there else None


def _state(communicator: Communicator) -> int:
    if users_group() is not None:
        return _THEIRS
    group = default_group()
    backend = None if group is None else backend_communicator(group)
    whole = backend is not None and backend.exception() is None
    return _OURS if whole and _parent is not None and _parent() is communicator else _NONE


def _make(communicator: Communicator, store: dist.Store) -> None:
    global _group, _parent
    split = communicator.split(list(range(communicator.size)))
    dist.init_process_group(
        "syncengine",
        store=store,
        rank=communicator.rank,
        world_size=communicator.size,
        timeout=timedelta(seconds=communicator.timeout),
        pg_options=split,
    )
    _group = weakref.ref(dist.distributed_c10d._get_default_group())
    _parent = weakref.ref(communicator)


def _shared_store(communicator: Communicator, launch: Launch, log_after: float) -> dist.Store:
    """Returns a store for one group: rank 0 opens it, and tells the others where. All ranks raise rank 0's error."""
    if communicator.size == 1:
        return dist.HashStore()
    store: dist.Store | None = None
    told: dict[str, Any] = {}
    if communicator.rank == 0:
        try:
            store, told = _open_store(communicator, launch, log_after)
            told["number"] = store.add("syncengine/torch_groups", 1)
        except Exception as error:
            told = {"error": error_text(error, named=False)[:512]}
    told = _broadcast(communicator, told)
    if "error" in told:
        raise InvalidUsage(f"init(torch_group=True): rank 0 has no store for the ranks of the group: {told['error']}")
    if store is None:
        address = told.get("address")
        store = _connect_store(*address) if address else launch_store(launch, communicator.timeout, log_after)
    assert store is not None
    store.set_timeout(timedelta(seconds=communicator.timeout))
    return dist.PrefixStore(f"syncengine/torch_group/{told['number']}", store)


def _open_store(communicator: Communicator, launch: Launch, log_after: float) -> tuple[dist.Store, dict[str, Any]]:
    """Opens, on rank 0, the launcher's store, or one that rank 0 serves and whose address the others need."""
    store = launch_store(launch, communicator.timeout, log_after)
    if store is not None:
        return store, {}
    host = store_address(communicator.hosts, os.environ)
    fixed = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    port = number(os.environ, "MASTER_PORT", launch.kind, 1, 65535) if fixed else 0
    served = serve_store(host, port, _CONNECTING)
    _served.append(served)
    return served, {"address": [host, served.port]}


def _connect_store(host: str, port: int) -> dist.Store:
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=_CONNECTING)
    except dist.DistError as error:
        raise InvalidUsage(
            f"init(torch_group=True): this rank can't reach the store of rank 0 at {host}:{port}: set MASTER_ADDR to "
            f"an address of rank 0's host that all reach ({error})"
        ) from error


def store_address(hosts: list[int], environ: Mapping[str, str]) -> str:
    """The address at which ranks reach rank 0, which calls this. `hosts`: the host of each rank."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    return "127.0.0.1" if len(set(hosts)) == 1 else reachable_address(environ)


def _broadcast(communicator: Communicator, told: dict[str, Any]) -> dict[str, Any]:
    payload = torch.zeros(_MOST_BYTES, dtype=torch.uint8, device="cpu")
    if communicator.rank == 0:
        text = json.dumps(told).encode()
        payload[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    communicator.broadcast(payload, 0)
    return dict(json.loads(bytes(payload.tolist()).rstrip(b"\0")))
