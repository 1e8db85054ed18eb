"""Hosts that are real to the kernel: ranks in network namespaces find, reduce with and lose each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from faults import WITHIN
from hosts import Hosts, why_not
from repository import ROOT, SUPPORT

needs_hosts = pytest.mark.skipif("why_not() is not None", reason=f"{why_not()}")
SILENCE = 2.0  # seconds without a sign of life after which a host is lost


class Job:
    """One rank for each entry of `places`: the number of its host. Leaving the `with` block ends them all."""

    def __init__(self, hosts: Hosts, places: list[int]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # also free in a namespace where nobody listens
        self.ranks = []
        for rank, host in enumerate(places):
            environ = {
                **{name: value for name, value in os.environ.items() if not name.startswith("SYNCENGINE_")},
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "SYNCENGINE_SILENCE": str(SILENCE),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, str(SUPPORT / "hosts_script.py")]
            pipe = subprocess.PIPE
            self.ranks.append(hosts.start(host, command, env=environ, stdin=pipe, stdout=pipe, text=True))
        assert [rank.stdout.readline() for rank in self.ranks] == ["ready\n"] * len(places)

    def go(self, count: int, rounds: int) -> None:
        for rank in self.ranks:
            print(count, rounds, file=rank.stdin, flush=True)

    def outcome(self, rank: int) -> dict:
        return json.loads(self.ranks[rank].stdout.readline())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.communicate(timeout=20)


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def check_that_no_more_is_sent_than_on_paper(job: Job, hosts: Hosts) -> None:
    count = 4 << 20
    before = [hosts.bytes_sent(host) for host in range(2)]
    job.go(count, rounds=1)
    for rank in range(len(job.ranks)):
        outcome = job.outcome(rank)
        assert outcome["error"] == "", outcome
        assert outcome["right"]
    for host in range(2):
        sent = hosts.bytes_sent(host) - before[host]
        # Each host sends the tensor once; 1.02 is for headers.
        assert 0.9 * 4 * count < sent < 1.02 * 4 * count


@needs_hosts
def test_two_hosts_find_each_other(two_hosts: Hosts) -> None:
    with Job(two_hosts, [0, 1]) as job:
        check_that_no_more_is_sent_than_on_paper(job, two_hosts)


@needs_hosts
def test_a_host_that_falls_silent_is_named(two_hosts: Hosts) -> None:
    with Job(two_hosts, [0, 0, 1]) as job:
        check_that_no_more_is_sent_than_on_paper(job, two_hosts)
        job.go(200_000, rounds=1_000_000)
        time.sleep(0.5)
        two_hosts.blackhole(1)
        lost_at = time.monotonic()
        for rank in range(3):
            outcome = job.outcome(rank)
            assert outcome["error"] == "PeerLost", outcome
            assert ("rank 2" if rank < 2 else "rank ") in outcome["text"]
            assert outcome["right"]
            assert outcome["at"] - lost_at < WITHIN
