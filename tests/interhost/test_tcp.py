"""TCP between network namespaces: what goes well, and what links and strangers do to it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import WITHIN
from hosts import INTERFACE, Hosts, why_not
from repository import ROOT

SECRET = "a secret of these tests"
SILENCE = 2.0  # seconds

NO_HOSTS = why_not()
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))


@pytest.fixture(scope="module")
def program() -> Path:
    make = subprocess.run(
        ["make", "-s", "-C", str(ROOT / "tests/core"), "tcp-rank"], capture_output=True, text=True, timeout=300
    )
    assert make.returncode == 0, make.stderr
    return ROOT / "build" / "core-plain" / "tcp_rank"


class Job:
    """Rank i runs on host i. Leaving the `with` block ends what still runs."""

    def __init__(self, hosts: Hosts, program: Path, size: int, mode: str = "exchange", **settings: object) -> None:
        given = {"interface": INTERFACE, "secret": SECRET, "timeout": 20, "silence": SILENCE, **settings}
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

    def connect(self, ranks: list[int] | None = None) -> None:
        """Gives the addresses out."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[rank].stdin.write("\n".join(self.addresses) + "\n")
            self.ranks[rank].stdin.flush()

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
            assert process.wait(10) == 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait(10)
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


@needs_hosts
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("interface", [INTERFACE, "^lo", "=eth0", "fd77::"])
def test_hosts_exchange(four, program, size, interface):
    if interface == "fd77::":
        interface = [f"fd77::{rank + 1:x}" for rank in range(size)]
    with Job(four, program, size, interface=interface, checksum=1, rounds=3) as job:
        job.connect()
        job.finish()


@needs_hosts
def test_loopback_is_refused_between_hosts(four, program):
    with Job(four, program, 2, interface="lo") as job:
        job.connect()
        for rank in range(2):
            kind, _, text = job.error(rank)
            assert kind == "InvalidUsage" and "listens on loopback" in text and "SYNCENGINE_INTERFACE" in text


@needs_hosts
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


@needs_hosts
@pytest.mark.parametrize("how", ["cut", "blackhole"])
def test_lost_link_is_named_within_the_silence(program, how):
    with Hosts(3) as hosts, running(hosts, program, 3) as job:
        getattr(hosts, how)(1)
        for rank in (0, 2):
            kind, seconds, text = job.error(rank)
            assert kind == "PeerLost"
            assert (
                "rank 1 has been silent" in text or f"rank {2 - rank}" in text
            )  # who ends first takes the other along
            assert seconds < WITHIN
        kind, seconds, text = job.error(1)
        assert kind == "PeerLost" and ("rank 0" in text or "rank 2" in text)
        assert seconds < WITHIN


@needs_hosts
def test_a_short_outage_is_survived(program):
    with Hosts(2) as hosts, running(hosts, program, 2, silence=10) as job:  # TCP tries again ever later
        hosts.blackhole(1)
        time.sleep(0.7)
        hosts.heal(1)
        for rank in (0, 1):
            for _ in range(50):
                job.wait_for(rank, "round")


@needs_hosts
def test_killed_rank_is_named_at_once(four, program):
    with running(four, program, 2, silence=10) as job:
        job.ranks[1].kill()
        kind, seconds, text = job.error(0)
        assert kind == "PeerLost" and "rank 1 died, or the network to it broke" in text
        assert seconds < WITHIN


@needs_hosts
def test_stopped_rank_is_named(four, program):
    with running(four, program, 2) as job:
        job.ranks[1].send_signal(signal.SIGSTOP)
        kind, _, text = job.error(0)
        job.ranks[1].send_signal(signal.SIGCONT)
        assert kind == "PeerLost" and "rank 1 has been silent" in text and "its process is stopped" in text
        kind, _, text = job.error(1)  # it woke up, and hears what happened
        assert kind == "PeerLost" and "rank 0" in text


@needs_hosts
def test_missing_rank_is_named_at_the_deadline(four, program):
    with Job(four, program, 3, timeout=1) as job:
        job.connect([0, 1])
        for rank in (0, 1):
            kind, _, text = job.error(rank)
            assert kind in ("Timeout", "PeerLost")
            assert "rank 2" in text or "broke off" in text


@needs_hosts
def test_unreachable_host_is_named_at_the_deadline(program):
    with Hosts(2) as hosts, Job(hosts, program, 2, timeout=1.5) as job:
        hosts.blackhole(0)
        job.connect()
        kind, _, text = job.error(1)
        assert kind == "Timeout" and "rank 1 waited in init() for rank 0 (10.77.0.1:" in text
        kind, _, text = job.error(0)
        assert kind == "Timeout" and "rank 0 waited in init() for rank 1" in text


@needs_hosts
def test_wrong_secret_is_named_on_both_hosts(four, program):
    with Job(four, program, 2, secret=[SECRET, "another secret, not that"], timeout=3) as job:
        job.connect()
        kind, seconds, text = job.error(1)
        assert kind == "InvalidUsage" and "different secrets" in text and seconds < WITHIN and SECRET not in text
        kind, _, text = job.error(0)  # it may be a stranger who calls: the rank is waited for
        assert kind == "Timeout" and "somebody called as rank 1 with another secret" in text and SECRET not in text


STRANGER = """
import socket, sys, time
host, port, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
print("here", flush=True)
sockets = []
while True:
    try:
        s = socket.create_connection((host, port), timeout=5)
        sockets.append(s)
        if how == "garbage":
            s.sendall(bytes(range(256)) * 40)
        elif how == "slow":
            s.sendall(b"n")
        elif how == "http":
            s.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        sockets = sockets[-300:]
    except OSError:
        time.sleep(0.01)
    time.sleep(0.002)
"""


@needs_hosts
@pytest.mark.parametrize("how", ["garbage", "half-open", "slow", "http"])
def test_strangers_do_not_disturb(four, program, how):
    """They come from another host, before the ranks do, while these connect, and while they work."""
    with Job(four, program, 3, rounds=5) as job:
        found = re.search(rb"\x0a\x4d\x00\x01" + rb"\0" * 12 + rb"(..)", bytes.fromhex(job.addresses[0]), re.DOTALL)
        port = str(int.from_bytes(found[1], "little"))
        stranger = four.start(
            3, [sys.executable, "-c", STRANGER, "10.77.0.1", port, how], stdout=subprocess.PIPE, text=True
        )
        try:
            stranger.stdout.readline()
            time.sleep(0.5)
            job.connect()
            job.finish()
        finally:
            stranger.kill()
            stranger.wait(10)
            stranger.stdout.close()


def test_program_ends_without_addresses(program):
    """The helper itself: it does not hang where a test breaks."""
    ended = subprocess.run([str(program), "0", "2", "exchange"], input="", capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1 and "error InvalidUsage" in ended.stdout
