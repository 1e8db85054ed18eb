"""Exchange through mpi4py: the ranks of COMM_WORLD."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from syncengine.errors import InvalidUsage
from syncengine.launch.arrivals import as_error, failure_notice, wait_for_ranks

MAX_PAYLOAD = 64 * 1024  # bytes; addresses and settings are far smaller

# Tags that a user's own first messages are unlikely to carry, within MPI's guaranteed 32767. Each exchange has two of
# its own, so that the next one does not receive messages that it left behind (a failure that nobody waited for, an
# address that nobody took).
_FIRST_TAG, _EXCHANGES = 21091, 1000
_PURPOSES = ("init", "doctor/facts", "doctor/outcomes", "doctor/leave")  # each has numbers and tags of its own
_opened: dict[str, int] = dict.fromkeys(_PURPOSES, 0)  # how many for each

_unfinished: list[Any] = []  # sends that nobody waits for: MPI may read their buffers until the process ends
_failed_tags: set[int] = set()  # tags of exchanges that failed here: their messages may still come


def _tags(purpose: str, number: int) -> tuple[int, int]:
    """The tags for addresses and for failures of the exchange with this number."""
    tag = _FIRST_TAG + 2 * (_PURPOSES.index(purpose) * _EXCHANGES + number % _EXCHANGES)
    return tag, tag + 1


def load(why: str, remedy: str) -> ModuleType:
    """Imports mpi4py's MPI, which begins MPI. If that fails, InvalidUsage says `why` it is needed, and a `remedy`."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, the MPI library is not
        raise InvalidUsage(
            f"{why}, but mpi4py can't be used: {error}. Install mpi4py for the launcher's own MPI, {remedy}"
        ) from error
    return MPI


def _load_started(started_as: str) -> ModuleType:
    return load(f"started by an MPI launcher ({started_as})", "or start with torchrun")


def world_size(started_as: str) -> int:
    """COMM_WORLD's size, for launchers that tell only a rank; `started_as` names the variable for errors."""
    return int(_load_started(started_as).COMM_WORLD.Get_size())


def is_running() -> bool:
    """Whether this process has begun MPI, and not ended it."""
    module: Any = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


class MPIExchange:
    """An Exchange over COMM_WORLD.

    A rank's n-th exchange for a `purpose` meets the n-th of the others, and raises the error that has ended theirs.
    """

    def __init__(self, rank: int, world_size: int, timeout: float, log_after: float, purpose: str = "init") -> None:
        started_as = f"rank {rank} of {world_size}"
        self._mpi = _load_started(started_as)
        self._comm = self._mpi.COMM_WORLD
        self._rank, self._peers = rank, [peer for peer in range(world_size) if peer != rank]
        self._timeout, self._log_after = timeout, log_after
        self.arrived: dict[int, bytes] = {}
        self._met, number = False, _opened[purpose]
        _opened[purpose] = number + 1
        self._tag, self._failed = _tags(purpose, number)
        self._tags_of_next = _tags(purpose, number + 1)
        really = self._comm.Get_rank(), self._comm.Get_size()
        if really != (rank, world_size):
            raise InvalidUsage(
                f"the launcher's variables say {started_as}, but mpi4py sees rank {really[0]} of {really[1]}: "
                f"mpi4py uses another MPI than the launcher ({self._mpi.Get_library_version().splitlines()[0]})"
            )

    def __call__(self, payload: bytes) -> list[bytes]:
        """Gathers every rank's payload: see Exchange."""
        if len(payload) > MAX_PAYLOAD:
            raise InvalidUsage(f"a payload of {len(payload)} bytes is more than the exchange's {MAX_PAYLOAD}")
        self.arrived = {}
        self._gather(payload, self.arrived)
        if not self._met:  # each has this rank's: so nobody had given up before, and left what was gathered
            self._gather(b"", {})
        self._met = True
        self._clear_away()
        return [self.arrived[peer] for peer in sorted(self.arrived)]

    def _gather(self, payload: bytes, values: dict[int, bytes]) -> None:
        """Puts every rank's payload into `values`."""
        # Messages between pairs of ranks, not one collective: only so a timeout can tell which ranks are missing.
        MPI, comm, peers = self._mpi, self._comm, self._peers
        buffers = {peer: bytearray(MAX_PAYLOAD) for peer in peers}
        receives = {peer: comm.Irecv([buffers[peer], MPI.BYTE], source=peer, tag=self._tag) for peer in peers}
        sends = {peer: comm.Isend([payload, MPI.BYTE], dest=peer, tag=self._tag) for peer in peers}
        values[self._rank] = payload

        def pending() -> set[int]:
            for peer in receives.keys() - values.keys():
                status = MPI.Status()
                if receives[peer].Test(status):
                    values[peer] = bytes(buffers[peer][: status.Get_count(MPI.BYTE)])
            return {peer for peer in peers if peer not in values or not sends[peer].Test()}

        def missing() -> set[int]:
            left = pending()
            if left and comm.Iprobe(tag=self._failed) and (left := pending()):  # again: all it sent before is here now
                self.check()
            return left

        what = "join (did its process call syncengine.init?)"
        try:
            wait_for_ranks(missing, what, self._timeout, self._log_after)
        except BaseException:
            self._leave_behind(sends.values())
            for receive in receives.values():  # they must not write into buffers that are gone
                if receive != MPI.REQUEST_NULL:
                    receive.Cancel()
                    receive.Wait()
            raise

    def check(self) -> None:
        """Raises the error of a rank that has failed, if any has: see Exchange."""
        if self._comm.Iprobe(tag=self._failed):
            text, status = bytearray(4096), self._mpi.Status()
            self._comm.Recv([text, self._mpi.BYTE], tag=self._failed, status=status)
            raise as_error(bytes(text[: status.Get_count(self._mpi.BYTE)]))

    def superseded(self) -> bool:
        """Whether another rank has opened the next exchange: see Exchange."""
        return not self._mpi.Is_finalized() and any(self._comm.Iprobe(tag=tag) for tag in self._tags_of_next)

    def fail(self, error: BaseException, where: str = "in init", to_come: bool = False) -> None:
        """Sends `error` to all other ranks: see Exchange. MPI_Finalize waits at the end for ranks that are to come."""
        payload = failure_notice(self._rank, error, where)
        self._leave_behind(
            self._comm.Isend([payload, self._mpi.BYTE], dest=peer, tag=self._failed) for peer in self._peers
        )

    def _leave_behind(self, sends: Iterable[Any]) -> None:
        _unfinished.extend(sends)
        _failed_tags.update((self._tag, self._failed))

    def _clear_away(self) -> None:
        """Receives messages that earlier exchanges have left: all have arrived, as they were sent before this one."""
        for tag in _failed_tags:
            while self._comm.Iprobe(tag=tag):
                self._comm.Recv([bytearray(MAX_PAYLOAD), self._mpi.BYTE], tag=tag)
        _failed_tags.clear()
