"""Exchange through a torch.distributed store: torchrun's, rank 0's own, or that of an initialised process group."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from syncengine.errors import InvalidUsage, PeerLost
from syncengine.launch.arrivals import name_ranks, wait_for_ranks

MAX_PAYLOAD = 64 * 1024  # bytes; addresses and settings are far smaller

# What rank 0 serves is kept until the process ends: the others may still be reading.
_served: dict[tuple[str, int], dist.Store] = {}


def open_store(host: str, port: int, rank: int, world_size: int, timeout: float, log_after: float) -> dist.Store:
    """The store at host:port, where rank 0 serves unless torchrun's agent does.

    The user's own init_process_group("env://") before or after shares the server: it is multi-tenant.
    """
    if (host, port) in _served:
        return _served[host, port]
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        # torch's own wait for the server is deaf to Ctrl-C and writes stack traces.
        listening = f"listen at {host}:{port} (MASTER_ADDR and MASTER_PORT: can this host reach it?)"
        wait_for_ranks({0}, lambda _: {0} if _is_listening(host, port) else set(), listening, timeout, log_after)
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=min(timeout, 30.0)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise InvalidUsage(
            f"rank {rank} can't open the rendezvous store at {host}:{port} (MASTER_ADDR and MASTER_PORT; is another "
            f"program on that port?): {error}"
        ) from error
    if serves:
        _served[host, port] = store
    return store


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def store_exchange(
    store: dist.Store, rank: int, world_size: int, timeout: float, log_after: float
) -> Callable[[bytes], list[bytes]]:
    """An all-gather of small byte strings over `store`. Each call on one rank meets the same call on all others."""
    missing = set(range(world_size))
    with _lost_store_as_lost_peer(rank, missing):
        # Every rank opens its n-th exchange over this store: n makes the keys this exchange's own, also after shutdown.
        number = store.add(f"syncengine/opened/{rank}", 1)
    own = dist.PrefixStore(f"syncengine/{number}", store)
    rounds = itertools.count()

    def exchange(payload: bytes) -> list[bytes]:
        if len(payload) > MAX_PAYLOAD:
            raise InvalidUsage(f"a payload of {len(payload)} bytes is more than the exchange's {MAX_PAYLOAD}")
        index = next(rounds)
        keys = [f"{index}/{peer}" for peer in range(world_size)]
        missing.update(range(world_size))

        def arrived(peers: set[int]) -> set[int]:
            missing.intersection_update(peers)
            return {peer for peer in peers if own.check([keys[peer]])}

        with _lost_store_as_lost_peer(rank, missing):
            own.set(keys[rank], payload)
            wait_for_ranks(
                missing, arrived, "join (did its process start, and call syncengine.init?)", timeout, log_after
            )
            values = [own.get(key) for key in keys]
        for peer, value in enumerate(values):
            if len(value) > MAX_PAYLOAD:
                raise InvalidUsage(f"rank {peer} sent {len(value)} bytes, more than the exchange's {MAX_PAYLOAD}")
        return values

    return exchange


@contextlib.contextmanager
def _lost_store_as_lost_peer(rank: int, missing: set[int]) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PeerLost(
            f"the rendezvous store is gone while rank {rank} waited for {name_ranks(missing)}: rank 0 or the launcher "
            f"has ended ({error})"
        ) from error
