"""Exchange through a torch.distributed store: torchrun's, rank 0's own, or that of an initialised process group."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from syncengine.errors import InvalidUsage, PeerLost
from syncengine.launch.arrivals import as_error, failure_notice, name_ranks, wait_for_ranks

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


class StoreExchange:
    """An all-gather of small byte strings over a store. Each call on one rank meets the same call on all others.

    `names` are what messages call the ranks (by default 0, 1, ...), and `call` is what each of them should have called.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        log_after: float,
        names: Sequence[int] | None = None,
        call: str = "call syncengine.init",
    ) -> None:
        self._names = list(range(world_size)) if names is None else list(names)
        self._rank, self._what = self._names[rank], f"join (did its process start, and {call}?)"
        self._timeout, self._log_after = timeout, log_after
        self._rounds = 0
        self.arrived: dict[int, bytes] = {}
        with _lost_store_as_lost_peer(self._rank, set(self._names)):
            # Every rank opens its n-th exchange over this store: n makes the keys this one's own, also after shutdown.
            number = store.add(f"syncengine/opened/{rank}", 1)
            self._store = dist.PrefixStore(f"syncengine/{number}", store)
            self._next = dist.PrefixStore(f"syncengine/{number + 1}", store)
            self._store.set("opened", b"")  # type: ignore[arg-type] # bytes are what it takes

    def __call__(self, payload: bytes) -> list[bytes]:
        """See Exchange."""
        if len(payload) > MAX_PAYLOAD:
            raise InvalidUsage(f"a payload of {len(payload)} bytes is more than the exchange's {MAX_PAYLOAD}")
        keys = {name: f"{self._rounds}/{peer}" for peer, name in enumerate(self._names)}
        self._rounds += 1
        missing = set(self._names)
        values: dict[int, bytes] = {}
        self.arrived = values

        def arrived(peers: set[int]) -> set[int]:
            missing.intersection_update(peers)
            if self._store.check(["failed"]):
                raise as_error(self._store.get("failed"))
            here = {peer for peer in peers if self._store.check([keys[peer]])}
            values.update((peer, self._store.get(keys[peer])) for peer in here)
            return here

        with _lost_store_as_lost_peer(self._rank, missing):
            self._store.set(keys[self._rank], payload)  # type: ignore[arg-type]
            wait_for_ranks(missing, arrived, self._what, self._timeout, self._log_after)
        for peer, value in values.items():
            if len(value) > MAX_PAYLOAD:
                raise InvalidUsage(f"rank {peer} sent {len(value)} bytes, more than the exchange's {MAX_PAYLOAD}")
        return [values[name] for name in self._names]

    def superseded(self) -> bool:
        """See Exchange."""
        with contextlib.suppress(dist.DistError):  # no store, no other exchange
            return self._next.check(["opened"])
        return False

    def fail(self, error: BaseException) -> None:
        """Makes the others' waits, now and later, end with this rank's error. The first one counts."""
        with contextlib.suppress(dist.DistError):  # the store is gone, and the others have noticed
            if not self._store.check(["failed"]):
                self._store.set("failed", failure_notice(self._rank, error))  # type: ignore[arg-type]


@contextlib.contextmanager
def _lost_store_as_lost_peer(rank: int, missing: set[int]) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PeerLost(
            f"the rendezvous store is gone while rank {rank} waited for {name_ranks(missing)}: rank 0 or the launcher "
            f"has ended ({error})"
        ) from error
