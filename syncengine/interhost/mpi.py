"""Packets between hosts through MPI: nonblocking calls of mpi4py on a separate communicator."""

import time
from types import ModuleType
from typing import Any

from syncengine._C import PacketTransport, python_packet_transport
from syncengine.errors import InvalidUsage
from syncengine.interhost import Meet, agree_on_number
from syncengine.launch.mpi import load

_TAG, _TAGS = 21090, 10_000
_CANCEL_SECONDS = 0.2

_unfinished: list[Any] = []  # requests that did not end, and what they use: MPI may touch it until the process ends


def open_mpi(rank: int, global_ranks: list[int], checksum: bool, meet: Meet) -> PacketTransport:
    """Opens a transport over MPI, as the package's docstring says. There is no `silence`: MPI has no heartbeats."""
    MPI = load("interhost='mpi'", "or give interhost='tcp'")
    _check(MPI, global_ranks[rank], max(global_ranks) + 1)
    number = agree_on_number(global_ranks, MPI.COMM_WORLD.Get_size(), meet)
    group = MPI.COMM_WORLD.Get_group()
    own = group.Incl(global_ranks)
    comm = MPI.COMM_WORLD.Create_group(own, _TAG + number % _TAGS)  # threads may make several at a time
    own.Free()
    group.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # else an error ends the process
    return python_packet_transport(MPIPacketTransport(MPI, comm), "MPI", checksum)


def _check(MPI: ModuleType, rank: int, ranks: int) -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise InvalidUsage("interhost='mpi' needs MPI to be initialized, and not finalized, when init() is called")
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise InvalidUsage(
            f"interhost='mpi' calls MPI on a thread of its own and needs the thread level MULTIPLE, but MPI was "
            f"initialized with {names[level]}: set mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported "
            "(or MPI4PY_RC_THREAD_LEVEL=multiple), or give interhost='tcp'"
        )
    own, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if own != rank or size < ranks:
        raise InvalidUsage(
            f"interhost='mpi', but rank {rank} of {ranks} is rank {own} of {size} in MPI: start the ranks by mpirun "
            "(or srun), each as the rank that MPI gives it, or give interhost='tcp'"
        )


class MPIPacketTransport:
    """Sends and receives packets over one communicator of MPI, as python_packet_transport needs."""

    def __init__(self, MPI: ModuleType, comm: Any) -> None:
        self._mpi, self._comm = MPI, comm
        self._ids: list[int] = []
        self._requests: list[Any] = []  # of each id

    def step(self, posts: list[tuple[int, int, bool, memoryview]]) -> list[tuple[int, str]]:
        """Posts packets (id, peer, whether it is sent, memory). Returns completed ids, each with an error or ""."""
        if self._mpi.Is_finalized():
            raise RuntimeError("MPI was finalized: call syncengine.shutdown() before MPI.Finalize()")
        ends = []
        for number, peer, outgoing, memory in posts:
            buffer = [memory, self._mpi.BYTE]
            try:
                post = self._comm.Isend if outgoing else self._comm.Irecv
                self._requests.append(post(buffer, peer, _TAG))
                self._ids.append(number)
            except self._mpi.Exception as error:
                ends.append((number, str(error)))
        return ends + self._test()

    def close(self, in_order: bool) -> None:
        """Ends the transport; no call follows. Requests that MPI can't cancel go on: their memory stays allocated."""
        if self._mpi.Is_finalized():
            return
        if in_order:
            self._comm.Free()
            return
        for request in self._requests:
            request.Cancel()  # MPI libraries cancel receives; sends go on
        deadline = time.monotonic() + _CANCEL_SECONDS
        while self._requests and time.monotonic() < deadline:
            self._test()
            time.sleep(0.001)
        _unfinished.extend([self._requests, self._comm])

    def _test(self) -> list[tuple[int, str]]:
        ended: dict[int, str] = {}
        while len(ended) < len(self._requests):
            try:
                index, done = self._mpi.Request.Testany(self._requests)
            except self._mpi.Exception as error:  # MPI has freed the requests that failed, perhaps several at once
                freed = [i for i, one in enumerate(self._requests) if i not in ended and one == self._mpi.REQUEST_NULL]
                if not freed:
                    raise
                ended.update(dict.fromkeys(freed, str(error)))
                continue
            if not done:
                break
            ended[index] = ""
        if not ended:
            return []
        ends = [(self._ids[index], error) for index, error in sorted(ended.items())]
        rest = [index for index in range(len(self._ids)) if index not in ended]
        self._ids = [self._ids[index] for index in rest]
        self._requests = [self._requests[index] for index in rest]
        return ends
