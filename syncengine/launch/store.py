"""Exchange through a torch.distributed store: torchrun's, rank 0's own, or an initialised process group's."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from syncengine.errors import Aborted, InvalidUsage, PeerLost, name_ranks
from syncengine.launch.arrivals import as_error, failure_notice, is_of_all, raise_if_ended, wait_for_ranks
from syncengine_autoload.rendezvous import Failed, Rendezvous

_AGENT_ANSWERS = 20.0  # seconds; it serves before it starts a rank

# Stores that rank 0 serves are kept until the process ends, since the others may still be reading.
_served: dict[tuple[str, int], dist.Store] = {}


def open_store(host: str, port: int, rank: int, world_size: int, timeout: float, log_after: float) -> dist.Store:
    """The store at host:port, where rank 0 serves unless torchrun's agent does.

    The user's own init_process_group("env://") before or after shares the server: it is multi-tenant.
    """
    if (host, port) in _served:
        return _served[host, port]
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_agent
    if not serves:
        # torch's own wait for the server is deaf to Ctrl-C and writes stack traces.
        ended = " has the launcher, which listens there, ended?" if of_agent else ""
        why_not = ""

        def missing() -> set[int]:
            nonlocal why_not
            try:
                socket.create_connection((host, port), timeout=0.5).close()
            except OSError as error:
                why_not = error.strerror or str(error) or type(error).__name__  # a timeout has a text alone
                return {0}
            return set()

        def listen() -> str:
            hint = f"MASTER_ADDR and MASTER_PORT: can this host reach it?{ended}"
            return f"listen at {host}:{port} ({why_not}; {hint})"

        wait_for_ranks(missing, listen, min(timeout, _AGENT_ANSWERS) if of_agent else timeout, log_after)
    try:
        limit = timedelta(seconds=min(timeout, 30.0))
        store = serve_store(host, port, limit) if serves else dist.TCPStore(host, port, is_master=False, timeout=limit)
    except dist.DistError as error:
        raise InvalidUsage(
            f"rank {rank} can't open the rendezvous store at {host}:{port} (MASTER_ADDR and MASTER_PORT; is another "
            f"program on that port?): {error}"
        ) from error
    if serves:
        _served[host, port] = store
    return store


def serve_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on loopback alone if `host` is loopback; torch's own stores listen on all addresses."""
    listener = None
    with contextlib.suppress(OSError):  # another store of this process is served there already, say
        addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if all(ipaddress.ip_address(address).is_loopback for address in addresses):
            family = socket.AF_INET6 if ":" in min(addresses) else socket.AF_INET
            listener = socket.create_server((min(addresses), port), family=family, backlog=1024).detach()
    try:
        return dist.TCPStore(host, port, None, True, timeout, False, multi_tenant=True, master_listen_fd=listener)
    except RuntimeError as error:
        if str(error) != os.strerror(errno.EAGAIN):  # the whole text where torch can't start a thread
            raise
        throw_not_started("a thread of the store")


def throw_not_started(what: str, code: int = errno.EAGAIN) -> NoReturn:
    """Raises InvalidUsage for a process or a thread that the system did not start, by errno `code`."""
    from syncengine._C import throw_system_error  # not above: the doctor needs no extension to start ranks

    throw_system_error(f"can't start {what}", code, "clone")


class StoreExchange:
    """An Exchange over a store. A rank's n-th exchange for a `purpose` meets the n-th of the others.

    If a rank was restarted, or tries again, its exchange takes the place of its last one
    (syncengine_autoload.rendezvous). Messages call the ranks by `names` (0, 1, ... by default), and ask whether each
    did as `call` says. `lost` is called while ranks are missing, and returns why they will not come, or "". Without it,
    `names` are the ranks in the job, and this process's communicators may know that one of them has ended.
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
        purpose: str = "init",
        lost: Callable[[], str] | None = None,
    ) -> None:
        self._lost, self._purpose = lost, purpose
        self._names = list(range(world_size)) if names is None else list(names)
        self._rank, self._what = self._names[rank], f"join (did its process start, and {call}?)"
        self._timeout, self._log_after = timeout, log_after
        self.arrived: dict[int, bytes] = {}
        with _lost_store_as_lost_peer(self._rank, set(self._names)):
            self._meeting = Rendezvous(store, purpose, rank, self._names)

    def __call__(self, payload: bytes) -> list[bytes]:
        """Gathers every rank's payload: see Exchange."""
        meeting, absent = self._meeting, set(self._names)
        self.arrived = {}

        def missing() -> set[int]:
            meeting.gather(payload)
            self.arrived = {self._names[peer]: value for peer, value in meeting.values.items()}
            absent.clear()
            absent.update(self._names[peer] for peer in meeting.missing())
            return absent

        def check(_: set[int]) -> None:
            there = meeting.there()
            if not all(there.values()) and missing():  # again: what these ranks did last is there by now
                self._raise_ended(there)
            if self._lost is None:
                raise_if_ended({self._names[peer] for peer in range(len(self._names)) if peer not in there})
            elif why := self._lost():
                raise PeerLost(why)

        with _lost_store_as_lost_peer(self._rank, absent), _told_as_error():
            if meeting.met:
                meeting.begin_round(payload)
            wait_for_ranks(missing, self._what, self._timeout, self._log_after, check)
        return [self.arrived[name] for name in self._names]

    def check(self) -> None:
        """Raises the error of a rank that has failed or died, if any has: see Exchange."""
        with contextlib.suppress(dist.DistError):  # if the store is gone, the ranks that need its process notice
            there = self._meeting.there()  # comes first, since a rank that fails says so and then ends
            with _told_as_error():
                self._meeting.check()
            if not all(there.values()):
                self._raise_ended(there)

    def _raise_ended(self, there: dict[int, bool]) -> NoReturn:
        ended = name_ranks(self._names[peer] for peer, lives in there.items() if not lives)
        raise PeerLost(f"{ended} died while the ranks connected")

    def superseded(self) -> bool:
        """Whether another rank has opened the next exchange: see Exchange."""
        with contextlib.suppress(dist.DistError):  # without the store there is no other exchange
            return self._meeting.superseded()
        return False

    def fail(self, error: BaseException, where: str = "in init", to_come: bool = False) -> None:
        """Writes the error to the store, unless another rank has done so before: see Exchange."""
        with contextlib.suppress(dist.DistError):  # if the store is gone, the others have noticed
            self._meeting.fail(failure_notice(self._rank, error, where))
            heard = isinstance(error, Aborted)  # another rank's error, which is in this store alone
            if heard or not is_of_all(error):
                self._meeting.stay_until_heard(to_come or (heard and self._purpose == "init"))


@contextlib.contextmanager
def _told_as_error() -> Iterator[None]:
    try:
        yield
    except Failed as failed:
        raise as_error(failed.notice) from None


@contextlib.contextmanager
def _lost_store_as_lost_peer(rank: int, missing: set[int]) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PeerLost(
            f"the rendezvous store is gone while rank {rank} waited for {name_ranks(missing)}: rank 0 or the launcher "
            f"has ended ({error})"
        ) from error
