"""Gathers a value in JSON from each rank that comes, over exchanges like the one by which ranks meet in `init`."""

import contextlib
import json
from typing import Any, NamedTuple

from syncengine.errors import SyncError, Timeout, name_ranks
from syncengine.launch import Exchange, Launch, open_exchange

_LOG_AFTER = 5.0
_LEAVE_TIMEOUT = 5.0


class Gathered(NamedTuple):
    """The values (`words`) by rank: this rank's own, and those of the ranks that came."""

    words: dict[int, Any]
    error: str  # why others' are missing, or ""

    def missing(self, ranks: int) -> set[int]:
        """The ranks that did not come."""
        return set(range(ranks)) - self.words.keys()


class Meeting:
    """The meeting of all ranks: gather() of facts, gather() of outcomes of the self-test if it runs, then leave().

    The first round waits at most `timeout` seconds; the second one twice that long, since ranks may have waited for
    each other in vain before it.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self._launch = launch
        self._error = ""
        self._exchanges: list[Exchange] = []
        if launch.world_size == 1:
            return
        try:
            # All exchanges are opened here, before init() opens one: every rank must open them in the same order.
            rounds = {"facts": timeout, "outcomes": 2 * timeout, "leave": _LEAVE_TIMEOUT}
            self._exchanges = [
                open_exchange(launch, seconds, _LOG_AFTER, purpose=f"doctor/{name}") for name, seconds in rounds.items()
            ]
        except SyncError as error:
            self._error = str(error)

    def gather(self, words: Any) -> Gathered:
        """Exchanges `words` with all ranks that come. All ranks call it equally often, twice at most."""
        own = {self._launch.rank: words}
        if not self._exchanges:
            return Gathered(own, self._error)
        exchange = self._exchanges.pop(0)
        try:
            exchange(json.dumps(words).encode())
            error = ""
        except SyncError as raised:
            gone = set(range(self._launch.world_size)) - exchange.arrived.keys() - {self._launch.rank}
            error = f"{name_ranks(gone)} did not come" if gone and isinstance(raised, Timeout) else str(raised)
        come = {rank: json.loads(answer) for rank, answer in exchange.arrived.items()}
        return Gathered(dict(sorted({**come, **own}.items())), error)

    def leave(self) -> None:
        """Waits until all ranks have read everything, since rank 0 may serve the store by which the others meet."""
        if self._exchanges:
            with contextlib.suppress(SyncError):
                self._exchanges[-1](b"")
