"""Transports between hosts other than TCP: packet transports, which the extension drives.

mpi.py      MPI, through mpi4py
torch.py    a torch.distributed process group
numbers.py  what tells several packet transports apart
"""

from __future__ import annotations

from collections.abc import Callable

from syncengine._C import PacketTransport
from syncengine.errors import InvalidUsage

__all__ = ["open_packet_transport"]


def open_packet_transport(
    interhost: str,
    rank: int,
    global_ranks: list[int],
    in_order: bool,
    checksum: bool,
    silence: float,
    meet: Callable[[bytes], list[bytes]],
) -> PacketTransport:
    """The transport that `interhost` names, for this rank of those that the launcher knows as `global_ranks`.

    `in_order`: all ranks of the job open it, and nothing else meanwhile; otherwise others may be opened at that time.
    `silence`: seconds without a heartbeat after which a rank is lost; MPI has no heartbeats.
    Collective. `meet` is an Exchange, called once it is clear that this rank can take part. Raises InvalidUsage if it
    can't, and what `meet` raises.
    """
    if interhost == "mpi":
        from syncengine.interhost.mpi import open_mpi

        return open_mpi(rank, global_ranks, checksum, meet)
    if interhost == "torch":
        from syncengine.interhost.torch import open_torch

        return open_torch(rank, global_ranks, in_order, checksum, silence, meet)
    raise InvalidUsage(f"interhost={interhost!r} moves no packets")
