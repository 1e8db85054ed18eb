"""Processes that join a run under way: they wait at the launcher's store until the ranks of the run let them in."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.communicator import connect_beside, replace_default
from syncengine.connect import Connection
from syncengine.errors import Aborted, InvalidUsage, Mismatch, PeerLost, SyncError, Timeout, error_text, name_ranks
from syncengine.launch.local import CAME, ENDED, JOIN, MEET, PLACE, ticket_of
from syncengine.launch.store import StoreExchange
from syncengine.parallel.replication import broadcast_bytes

logger = logging.getLogger("syncengine")

_LOOK = 0.5  # seconds between two looks whether somebody waits
_PATIENCE = 30.0  # seconds for a rank that is stopped while others join
_MOST = 64  # processes that are let in at a time


_LAUNCHER_LOST = "the launcher, or its store, has ended"


@contextlib.contextmanager
def _lost_store_as_lost_peer() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PeerLost(f"{_LAUNCHER_LOST}: nobody can join any more ({error_text(error).splitlines()[0]})") from error


class Undecided(Aborted):
    """The launcher's store is gone, so this rank can't know whether others go on with new ranks: it must not go on."""


class Door:
    """The place at the launcher's store where processes wait, and where ranks let them in."""

    def __init__(self, address: str, name: int | None) -> None:
        host, _, port = address.rpartition(":")
        with _lost_store_as_lost_peer():
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_PATIENCE))
        self.name = name  # of this process, if it joins
        self._looked = time.monotonic()
        self._is_lost = False

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ) -> Door | None:
        """Connects to the launcher's store. Returns None unless `syncengine run --keep-going` started this process."""
        if MEET not in environ:
            return None
        return cls(environ[MEET], int(environ[JOIN]) if JOIN in environ else None)

    def somebody_waits(self) -> bool:
        """Whether a process waits to be let in. Only the first rank calls it. False within 0.5 s of the last look."""
        if time.monotonic() < self._looked + _LOOK:
            return False
        self._looked = time.monotonic()
        return bool(self._waiting())

    def look(self, communicator: Communicator) -> None:
        """Makes all ranks leave their step, as if a rank had died, if a process waits. Only the first rank looks."""
        if communicator.rank == 0 and self.somebody_waits():
            communicator.abort("another rank joins: all begin the step anew")

    def let_in(self, communicator: Communicator, facts: str) -> Communicator:
        """Lets waiting processes in. Returns the communicator with them, which is the default one from then on.

        It returns the old communicator if no process waits, or not all can join. All ranks call it. `facts` must be the
        same on the ranks and on the processes.
        """
        own = [secrets.randbits(60), *self._waiting()[:_MOST]] if communicator.rank == 0 else []
        number, *names = json.loads(broadcast_bytes(communicator, json.dumps(own).encode(), 0))
        if not names:
            return communicator
        ranks = [*communicator.global_ranks, *names]
        if communicator.rank == 0:
            with contextlib.suppress(dist.DistError):  # all hear that the launcher has died
                for name in names:
                    self._store.set(ticket_of(name), json.dumps({"number": number, "ranks": ranks}))
        try:
            return self._join(number, ranks, communicator.rank, facts)
        except Undecided:
            raise
        except SyncError as error:
            logger.warning("nobody joins: %s", error)
            return communicator

    @_lost_store_as_lost_peer()
    def enter(self, facts: str, timeout: float) -> Communicator:
        """Waits until this process is let in, and again if a rank dies meanwhile. Returns the communicator."""
        assert self.name is not None
        deadline, ticket = time.monotonic() + timeout, ticket_of(self.name)
        self._store.append(CAME, f"{self.name} ")  # type: ignore[attr-defined] # which torch's stub lacks
        while True:
            while not self._store.check([ticket]):
                if time.monotonic() > deadline:
                    raise Timeout(f"rank {self.name} was not let in within {timeout:g} s: has the run ended?")
                time.sleep(0.02)
            told = json.loads(self._store.get(ticket))
            try:
                return self._join(told["number"], told["ranks"], told["ranks"].index(self.name), facts)
            except SyncError as error:
                if isinstance(error, InvalidUsage | Mismatch):
                    raise
                logger.warning("waits again to be let in: %s", error)
                self._store.delete_key(ticket)

    def _waiting(self) -> list[int]:
        """The numbers of the processes that wait to be let in. If the launcher has died: none, and one warning."""
        try:
            came = self._read(CAME)
            if came and not self._store.check([ticket_of(name) for name in came]):
                ended = self._read(ENDED)
                return [name for name in came if name not in ended and not self._store.check([ticket_of(name)])]
        except dist.DistError:
            if not self._is_lost:
                logger.warning("%s: nobody can join any more", _LAUNCHER_LOST)
            self._is_lost = True
        return []

    def _read(self, key: str) -> list[int]:
        said = self._store.get(key).split() if self._store.check([key]) else []
        return [int(name) for name in said if name.isdigit()]

    def _join(self, number: int, ranks: list[int], rank: int, facts: str) -> Communicator:
        """Connects `ranks` by a new default communicator, all of them or none. If none, raises a SyncError."""
        verdict, connected = f"{PLACE}/verdict/{number}", f"{PLACE}/connected/{number}"
        deadline = time.monotonic() + _PATIENCE

        def lost() -> str:
            with contextlib.suppress(dist.DistError):
                if ended := set(self._read(ENDED)) & set(ranks):
                    return f"{name_ranks(ended)} died meanwhile"
                if self._store.check([verdict]):
                    return "another rank could not connect: see its own error"
            return f"not all ranks connected within {_PATIENCE:g} s" if time.monotonic() > deadline else ""

        try:
            connection = self._meet(f"joining {number}", ranks, rank, facts, lost)
        except BaseException:
            with contextlib.suppress(dist.DistError):
                self._store.set(verdict, "none")
            raise
        # Ranks may differ in whether all have connected, so none decides for itself: one rank writes a verdict for all
        # to the store. The first verdict counts.
        try:
            self._store.add(connected, 1)
            while not self._store.check([verdict]):
                if self._store.add(connected, 0) == len(ranks):
                    self._store.compare_set(verdict, "", "all")
                elif lost():
                    self._store.compare_set(verdict, "", "none")
                else:
                    time.sleep(0.001)
            all_can = self._store.get(verdict) == b"all"
        except dist.DistError as error:
            connection.communicator.close()
            raise Undecided(
                f"{_LAUNCHER_LOST} while ranks joined, and with whom the others go on can't be told"
            ) from error
        if not all_can:
            connection.communicator.close()
            raise PeerLost("not all ranks could connect")
        replace_default(connection)
        return connection.communicator

    def _meet(self, purpose: str, ranks: list[int], rank: int, facts: str, lost: Callable[[], str]) -> Connection:
        call = "call syncengine.elastic"
        exchange = StoreExchange(self._store, rank, len(ranks), _PATIENCE, 5.0, ranks, call, purpose, lost)
        answers = exchange(facts.encode())
        for other, theirs in zip(ranks, answers, strict=True):
            if theirs != answers[0]:
                raise Mismatch(
                    f"rank {other} has another state for elastic() than rank {ranks[0]}: {theirs.decode()} instead of "
                    f"{answers[0].decode()}. Give all ranks the same script, model and optimizer"
                )
        return connect_beside(exchange, rank, ranks, lost)
