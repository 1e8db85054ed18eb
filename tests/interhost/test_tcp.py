"""TCP between network namespaces: what goes well, and what links do to it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import WITHIN
from hosts import INTERFACE, Hosts
from marks import mostly_nightly
from repository import ROOT

SECRET = "a secret of these tests"

pytestmark = pytest.mark.usefixtures("needs_hosts")


@pytest.fixture(scope="module")
def program() -> Path:
    make = subprocess.run(
        ["make", "-s", "-C", str(ROOT / "tests/core"), "tcp-rank"], capture_output=True, text=True, timeout=1800
    )
    assert make.returncode == 0, make.stderr
    return ROOT / "build" / "core-extension" / "tcp_rank"


class Job:
    """Rank i runs on host i. Leaving the `with` block ends what still runs."""

    def __init__(self, hosts: Hosts, program: Path, size: int, mode: str = "exchange", **settings: object) -> None:
        given = {"interface": INTERFACE, "secret": SECRET, "timeout": 60, "silence": 20, **settings}
        words = [f"{name}={value}" for name, value in given.items() if not isinstance(value, list)]
        self.ranks = []
        for rank in range(size):
            own = [f"{name}={value[rank]}" for name, value in given.items() if isinstance(value, list)]
            command = [str(program), str(rank), str(size), mode, *words, *own]
            self.ranks.append(
                hosts.start(rank, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
        self.addresses = [self.line(rank).removeprefix("address ") for rank in range(size)]

    def line(self, rank: int) -> str:
        return self.ranks[rank].stdout.readline().strip()

    def connect(self) -> None:
        """Gives the addresses out."""
        for rank in self.ranks:
            rank.stdin.write("\n".join(self.addresses) + "\n")
            rank.stdin.flush()

    def wait_for(self, rank: int, start: str) -> str:
        while line := self.line(rank):
            if line.startswith(start):
                return line
            assert not line.startswith("error"), line
        raise AssertionError(f"rank {rank} ended before it said {start!r}")

    def error(self, rank: int) -> tuple[str, float, str]:
        """Kind, seconds since the last round, text."""
        while line := self.line(rank):
            if found := re.fullmatch(r"error (\w+) (\S+) (.*)", line):
                return found[1], float(found[2]), found[3]
        raise AssertionError(f"rank {rank} ended without an error")

    def finish(self) -> None:
        for rank, process in enumerate(self.ranks):
            assert self.wait_for(rank, "done")
            assert process.wait(120) == 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait(120)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    with Hosts(4) as hosts:
        yield hosts


@contextlib.contextmanager
def running(hosts: Hosts, program: Path, size: int, **settings: object) -> Iterator[Job]:
    """A job in which all ranks are in the middle of it."""
    with Job(hosts, program, size, rounds=1000000, **settings) as job:
        job.connect()
        for rank in range(size):
            job.wait_for(rank, "round 1")
        yield job


@pytest.mark.parametrize("size", mostly_nightly([2, 3, 4], 1))
@pytest.mark.parametrize("interface", [INTERFACE, "^lo", "=eth0", "fd77::"])
def test_hosts_exchange(four, program, size, interface):
    if interface == "fd77::":
        interface = [f"fd77::{rank + 1:x}" for rank in range(size)]
    with Job(four, program, size, interface=interface, checksum=1, rounds=3) as job:
        job.connect()
        job.finish()


def test_loopback_is_refused_between_hosts(four, program):
    with Job(four, program, 2, interface="lo") as job:
        job.connect()
        for rank in range(2):
            kind, _, text = job.error(rank)
            assert kind == "InvalidUsage" and "listens on loopback" in text and "SYNCENGINE_INTERFACE" in text


@pytest.mark.thorough
def test_slow_links_deliver(program):
    with Hosts(2, rate="200mbit") as hosts, Job(hosts, program, 2, "pump", rounds=16, bytes=1 << 20) as job:
        before = hosts.bytes_sent(0)
        job.connect()
        line = job.wait_for(0, "pumped")
        job.finish()
        sent = hosts.bytes_sent(0) - before
    assert int(line.split()[1]) == 16 << 20
    # What travels beside the data: our headers are 40 bytes in 256 KiB, TCP/IP's about 66 in 1448, and acknowledgments.
    assert 1 <= sent / (16 << 20) <= 1.1


@pytest.mark.thorough
@pytest.mark.parametrize("how", mostly_nightly(["cut", "blackhole"], 0))
def test_lost_link_is_named_within_the_silence(program, how):
    with Hosts(3) as hosts, running(hosts, program, 3, silence=2) as job:
        getattr(hosts, how)(1)
        for rank in (0, 2):
            kind, seconds, text = job.error(rank)
            assert kind == "PeerLost"
            # The first one to end takes the other along.
            assert "rank 1 has been silent" in text or f"rank {2 - rank}" in text
            assert seconds < WITHIN
        kind, seconds, text = job.error(1)
        assert kind == "PeerLost" and ("rank 0" in text or "rank 2" in text)
        assert seconds < WITHIN


@pytest.mark.thorough
def test_a_short_outage_is_survived(program):
    with Hosts(2) as hosts, running(hosts, program, 2, silence=10) as job:  # TCP tries again ever later
        hosts.blackhole(1)
        time.sleep(0.7)
        hosts.heal(1)
        for rank in (0, 1):
            for _ in range(50):
                job.wait_for(rank, "round")


@pytest.mark.thorough
def test_unreachable_host_is_named_at_the_deadline(program):
    with Hosts(2) as hosts, Job(hosts, program, 2, timeout=1.5) as job:
        hosts.blackhole(0)
        job.connect()
        kind, _, text = job.error(1)
        assert kind == "Timeout" and "rank 1 waited in init() for rank 0 (10.77.0.1:" in text
        kind, _, text = job.error(0)
        assert kind == "Timeout" and "rank 0 waited in init() for rank 1" in text
