"""Transports between hosts other than TCP: packet transports, which the extension drives.

mpi.py      MPI, through mpi4py
torch.py    a torch.distributed process group

Each opens the transport of this rank of those that the launcher knows as `global_ranks`. Collective: `meet` is an
Exchange, called once it is clear that this rank can take part. Raises InvalidUsage if it can't, and what `meet` raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

Meet = Callable[[bytes], list[bytes]]

_opened = itertools.count()  # next() of it is atomic: threads may open packet transports of different groups at a time


def agree_on_number(global_ranks: list[int], job_size: int, meet: Meet) -> int:
    """One that no other transport of these ranks, or of some of them, has or gets. Collective over them, by `meet`.

    In no agreed order with those of other groups, so it is the first member's own count and that member's rank.
    """
    of_first = int(meet(str(next(_opened)).encode())[0])
    return of_first * job_size + global_ranks[0]
