"""Transports between hosts other than TCP: packet transports, which the extension drives.

Each module opens this rank's transport to the ranks that the launcher knows as `global_ranks`. All of these ranks open
it together. `meet` sends bytes to all of them, and returns what each has sent; it is called once it is clear that this
rank can take part. If it can't, opening raises InvalidUsage. An error of `meet` is raised as it is.
"""

import itertools
from collections.abc import Callable

Meet = Callable[[bytes], list[bytes]]

_opened = itertools.count()  # next() of it is atomic: threads may open packet transports of different groups at a time


def agree_on_number(global_ranks: list[int], job_size: int, meet: Meet) -> int:
    """A number that no other transport of any of these ranks has or gets. All of these ranks call it, with `meet`.

    Transports of different groups are opened in no agreed order, so the number is made of the first member's own count
    and that member's rank.
    """
    of_first = int(meet(str(next(_opened)).encode())[0])
    return of_first * job_size + global_ranks[0]
