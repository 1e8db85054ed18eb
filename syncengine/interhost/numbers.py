"""Numbers by which the ranks of several packet transports, opened at the same time, tell them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable

_opened = itertools.count()  # next() of it is atomic: threads may open packet transports of different groups at a time


def agree_on_number(global_ranks: list[int], job_size: int, meet: Callable[[bytes], list[bytes]]) -> int:
    """One that no other transport of these ranks, or of some of them, has or gets. Collective over them, by `meet`.

    In no agreed order with those of other groups, so it is the first member's own count and that member's rank.
    """
    of_first = int(meet(str(next(_opened)).encode())[0])
    return of_first * job_size + global_ranks[0]
