"""Hosts that are real to the kernel: ranks in network namespaces find, reduce with and lose each other."""

import time
from collections.abc import Callable

import pytest
from faults import WITHIN, Outcome, my_rank
from hosts import INTERFACE, Hosts
from pool import RankPool
from test_hosts import all_reduce_until_it_fails, wait_until_busy


def enter_and_all_reduce(enter: Callable[[int], None]) -> Outcome:
    enter(my_rank())
    return all_reduce_until_it_fails()


@pytest.mark.thorough
@pytest.mark.usefixtures("needs_hosts")
def test_a_host_that_falls_silent_is_named(pool: RankPool) -> None:
    environ = {"SYNCENGINE_SILENCE": "2", "SYNCENGINE_INTERFACE": INTERFACE}
    with Hosts(2) as hosts:
        enter = hosts.entering([0, 0, 1])
        with pool.spawn_ranks(enter_and_all_reduce, enter, world=3, settings=None, environ=environ) as ranks:
            wait_until_busy(ranks)
            hosts.blackhole(1)
            lost_at = time.monotonic()
            for number, rank in enumerate(ranks):
                outcome = rank.result()
                outcome.check("PeerLost", "rank 2" if number < 2 else "rank ")
                assert outcome.at - lost_at < WITHIN
