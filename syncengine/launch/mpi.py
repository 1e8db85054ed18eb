"""Exchange through mpi4py: the ranks of COMM_WORLD."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from syncengine.errors import InvalidUsage
from syncengine.launch.arrivals import as_error, failure_notice, wait_for_ranks

MAX_PAYLOAD = 64 * 1024  # bytes; addresses and settings are far smaller

# Tags that a user's own first messages are unlikely to carry, within MPI's guaranteed 32767: two for each exchange, so
# that what one left behind (a failure that nobody waited for, an address that nobody took) is none of the next one's.
_FIRST_TAG, _EXCHANGES = 21091, 5000
_opened = itertools.count()

_unfinished: list[Any] = []  # sends that nobody waits for: MPI may read their buffers until the process ends
_failed_tags: set[int] = set()  # of exchanges that failed here, whose messages may still come


def _tags(number: int) -> tuple[int, int]:
    """For addresses and for failures of the exchange with this number: the n-th on one rank meets the n-th on all."""
    tag = _FIRST_TAG + 2 * (number % _EXCHANGES)
    return tag, tag + 1


def _load(started_as: str) -> ModuleType:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, the MPI library is not
        raise InvalidUsage(
            f"started by an MPI launcher ({started_as}), but mpi4py can't be used: {error}. Install mpi4py for the "
            "launcher's own MPI, or start with torchrun"
        ) from error
    return MPI


def world_size(started_as: str) -> int:
    """COMM_WORLD's size, for launchers that tell only a rank; `started_as` names the variable for errors."""
    return int(_load(started_as).COMM_WORLD.Get_size())


class MPIExchange:
    """An all-gather of small byte strings over COMM_WORLD. Each call on one rank meets the same call on all others."""

    def __init__(self, rank: int, world_size: int, timeout: float, log_after: float) -> None:
        started_as = f"rank {rank} of {world_size}"
        self._mpi = _load(started_as)
        self._comm = self._mpi.COMM_WORLD
        self._rank, self._peers = rank, [peer for peer in range(world_size) if peer != rank]
        self._timeout, self._log_after = timeout, log_after
        self.arrived: dict[int, bytes] = {}
        number = next(_opened)
        self._tag, self._failed = _tags(number)
        self._tags_of_next = _tags(number + 1)
        really = self._comm.Get_rank(), self._comm.Get_size()
        if really != (rank, world_size):
            raise InvalidUsage(
                f"the launcher's variables say {started_as}, but mpi4py sees rank {really[0]} of {really[1]}: "
                f"mpi4py uses another MPI than the launcher ({self._mpi.Get_library_version().splitlines()[0]})"
            )

    def __call__(self, payload: bytes) -> list[bytes]:
        """See Exchange."""
        if len(payload) > MAX_PAYLOAD:
            raise InvalidUsage(f"a payload of {len(payload)} bytes is more than the exchange's {MAX_PAYLOAD}")
        # Point to point, not one collective: only so a timeout can tell who is missing.
        MPI, comm, peers = self._mpi, self._comm, self._peers
        buffers = {peer: bytearray(MAX_PAYLOAD) for peer in peers}
        receives = {peer: comm.Irecv([buffers[peer], MPI.BYTE], source=peer, tag=self._tag) for peer in peers}
        sends = {peer: comm.Isend([payload, MPI.BYTE], dest=peer, tag=self._tag) for peer in peers}
        self.arrived = values = {self._rank: payload}

        def missing() -> set[int]:
            if comm.Iprobe(tag=self._failed):
                text = bytearray(4096)
                status = MPI.Status()
                comm.Recv([text, MPI.BYTE], tag=self._failed, status=status)
                raise as_error(bytes(text[: status.Get_count(MPI.BYTE)]))
            for peer in receives.keys() - values.keys():
                status = MPI.Status()
                if receives[peer].Test(status):
                    values[peer] = bytes(buffers[peer][: status.Get_count(MPI.BYTE)])
            return {peer for peer in peers if peer not in values or not sends[peer].Test()}

        what = "join (did its process call syncengine.init?)"
        try:
            wait_for_ranks(missing, what, self._timeout, self._log_after)
        except BaseException:
            self._leave_behind(sends.values())
            for receive in receives.values():  # and must not write into buffers that are gone
                if receive != MPI.REQUEST_NULL:
                    receive.Cancel()
                    receive.Wait()
            raise
        self._clear_away()
        return [values[peer] for peer in sorted(values)]

    def superseded(self) -> bool:
        """See Exchange."""
        return not self._mpi.Is_finalized() and any(self._comm.Iprobe(tag=tag) for tag in self._tags_of_next)

    def fail(self, error: BaseException) -> None:
        """Makes the others' waits end with this rank's error."""
        payload = failure_notice(self._rank, error)
        self._leave_behind(
            self._comm.Isend([payload, self._mpi.BYTE], dest=peer, tag=self._failed) for peer in self._peers
        )

    def _leave_behind(self, sends: Iterable[Any]) -> None:
        _unfinished.extend(sends)
        _failed_tags.update((self._tag, self._failed))

    def _clear_away(self) -> None:
        """Receives what earlier exchanges have left. It has arrived: each rank sent it before its part of this one."""
        for tag in _failed_tags:
            while self._comm.Iprobe(tag=tag):
                self._comm.Recv([bytearray(MAX_PAYLOAD), self._mpi.BYTE], tag=tag)
        _failed_tags.clear()
