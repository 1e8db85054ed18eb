"""Exchange through mpi4py: the ranks of COMM_WORLD."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from syncengine.errors import InvalidUsage
from syncengine.launch.arrivals import wait_for_ranks

MAX_PAYLOAD = 64 * 1024  # bytes; addresses and settings are far smaller

_TAG = 21091  # any number that a user's own first messages are unlikely to carry; within MPI's guaranteed 32767


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
    return _load(started_as).COMM_WORLD.Get_size()


def mpi_exchange(rank: int, world_size: int, timeout: float, log_after: float) -> Callable[[bytes], list[bytes]]:
    """An all-gather of small byte strings over COMM_WORLD. Each call on one rank meets the same call on all others."""
    started_as = f"rank {rank} of {world_size}"
    MPI = _load(started_as)
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (rank, world_size):
        raise InvalidUsage(
            f"the launcher's variables say {started_as}, but mpi4py sees rank {comm.Get_rank()} of {comm.Get_size()}: "
            f"mpi4py uses another MPI than the launcher ({MPI.Get_library_version().splitlines()[0]})"
        )

    def exchange(payload: bytes) -> list[bytes]:
        if len(payload) > MAX_PAYLOAD:
            raise InvalidUsage(f"a payload of {len(payload)} bytes is more than the exchange's {MAX_PAYLOAD}")
        # Point to point, not one collective: only so a timeout can tell who is missing.
        peers = [peer for peer in range(world_size) if peer != rank]
        buffers = {peer: bytearray(MAX_PAYLOAD) for peer in peers}
        receives = {peer: comm.Irecv([buffers[peer], MPI.BYTE], source=peer, tag=_TAG) for peer in peers}
        sends = [comm.Isend([payload, MPI.BYTE], dest=peer, tag=_TAG) for peer in peers]
        values = {rank: payload}

        def arrived(missing: set[int]) -> set[int]:
            for peer in missing:
                status = MPI.Status()
                if receives[peer].Test(status):
                    values[peer] = bytes(buffers[peer][: status.Get_count(MPI.BYTE)])
            return missing & values.keys()

        wait_for_ranks(set(peers), arrived, "join (did its process call syncengine.init?)", timeout, log_after)
        MPI.Request.Waitall(sends)
        return [values[peer] for peer in range(world_size)]

    return exchange
