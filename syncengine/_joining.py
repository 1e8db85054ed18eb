"""Processes that join a run under way: they wait at the launcher's store until the ranks of the run let them in."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.communicator import connect_beside, replace_default
from syncengine.connect import Connection
from syncengine.errors import InvalidUsage, Mismatch, SyncError, Timeout
from syncengine.launch.local import JOIN, MEET, PLACE
from syncengine.launch.store import StoreExchange

logger = logging.getLogger("syncengine")

_LOOK = 0.5  # seconds between two looks whether somebody waits
_PATIENCE = 30.0  # seconds for those that are let in to come


class Door:
    """Where they wait, and where they are let in; None without a launcher that keeps ranks going."""

    def __init__(self, address: str, name: int | None) -> None:
        host, _, port = address.rpartition(":")
        self._store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_PATIENCE))
        self.name = name  # of this process, if it joins
        self._let_in = 0  # so far
        self._looked = time.monotonic()

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ) -> Door | None:
        """By the launcher's variables."""
        if MEET not in environ:
            return None
        return cls(environ[MEET], int(environ[JOIN]) if JOIN in environ else None)

    def somebody_waits(self) -> bool:
        """As far as this rank knows, which looks now and then. To be asked by the first rank."""
        if time.monotonic() < self._looked + _LOOK:
            return False
        self._looked = time.monotonic()
        return len(self._names()) > self._let_in

    def look(self, communicator: Communicator) -> None:
        """By the first rank: if somebody waits, all leave their step, as where a rank has died."""
        if communicator.rank == 0 and self.somebody_waits():
            communicator.abort("another rank joins: all begin the step anew")

    def let_in(self, communicator: Communicator, facts: str) -> Communicator:
        """The communicator with those that wait, which becomes the default one; or the same, if nobody waits or they
        can't join. Collective. `facts` are what they must have in common with these ranks."""
        came = len(self._names()) if communicator.rank == 0 else 0
        told = torch.tensor([came, self._let_in], dtype=torch.int64)
        communicator.broadcast(told, 0)
        waiting, let_in = told.tolist()
        self._let_in = max(waiting, let_in)
        if waiting <= let_in:
            return communicator
        connection = None
        try:
            names = self._names()[let_in:waiting]
            ranks = [*communicator.global_ranks, *names]
            if communicator.rank == 0:
                for name in names:
                    self._store.set(f"{PLACE}/ticket/{name}", json.dumps({"ranks": ranks, "let_in": waiting}))
            connection = self._meet(ranks, communicator.rank, facts)
        except (SyncError, dist.DistError) as error:
            logger.warning("nobody joins: %s", error)
        agreed = torch.tensor([int(connection is not None)], dtype=torch.int64)
        communicator.all_reduce(agreed, "min")
        if connection is None or not int(agreed):
            if connection is not None:
                connection.communicator.close()
            return communicator
        replace_default(connection)
        return connection.communicator

    def enter(self, facts: str, timeout: float) -> Communicator:
        """Waits until this process is let in; again if one of the others dies meanwhile."""
        deadline, ticket = time.monotonic() + timeout, f"{PLACE}/ticket/{self.name}"
        while True:
            self._store.append(PLACE, f"{self.name} ")  # type: ignore[attr-defined] # which torch's stub lacks
            while not self._store.check([ticket]):
                if time.monotonic() > deadline:
                    raise Timeout(f"rank {self.name} was not let in within {timeout:g} s: has the run ended?")
                time.sleep(0.02)
            told = json.loads(self._store.get(ticket))
            self._let_in = told["let_in"]
            try:
                connection = self._meet(told["ranks"], told["ranks"].index(self.name), facts)
            except SyncError as error:
                if isinstance(error, InvalidUsage | Mismatch):
                    raise
                logger.warning("waits again to be let in: %s", error)
                self._store.delete_key(ticket)
                continue
            replace_default(connection)
            return connection.communicator

    def _names(self) -> list[int]:
        """Of all that have come so far; none where the launcher has died."""
        with contextlib.suppress(dist.DistError):
            return [int(name) for name in self._store.get(PLACE).split()] if self._store.check([PLACE]) else []
        return []

    def _meet(self, ranks: list[int], rank: int, facts: str) -> Connection:
        purpose = f"joining {self._let_in}"
        call = "call syncengine.elastic"
        exchange = StoreExchange(self._store, rank, len(ranks), _PATIENCE, 5.0, ranks, call, purpose)
        answers = exchange(facts.encode())
        for other, theirs in zip(ranks, answers, strict=True):
            if theirs != answers[0]:
                raise Mismatch(
                    f"rank {other} has another state for elastic() than rank {ranks[0]}: {theirs.decode()} instead of "
                    f"{answers[0].decode()}. Give all ranks the same script, model and optimizer"
                )
        return connect_beside(exchange, rank, ranks)
