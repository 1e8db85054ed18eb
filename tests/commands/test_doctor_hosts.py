"""`syncengine doctor` on hosts of their own: they meet, but can they connect?"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from command import environ_of
from hosts import Hosts
from pool import RankPool
from programs import run_programs

pytestmark = pytest.mark.usefixtures("needs_hosts")


def reports(
    programs: RankPool, hosts: Hosts, port: int, timeout: int, interfaces: Sequence[str] = ("eth0", "eth0")
) -> list[Any]:
    """Of one rank on each of two hosts: its exit code, and what it printed."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
    environs = [environ_of(RANK=str(rank), SYNCENGINE_INTERFACE=interfaces[rank], **common) for rank in range(2)]
    command = ["-m", "syncengine", "doctor", "--json", "--timeout", str(timeout)]
    said = run_programs(programs, command, environs, prepare=hosts.entering([0, 1]))
    return [(rank.returncode, json.loads(rank.stdout) if rank.stdout else None) for rank in said]


@pytest.mark.nightly
def test_hosts_that_reach_each_other(programs: RankPool, unused_port: int):
    with Hosts(2) as hosts:
        (code, report), other = reports(programs, hosts, unused_port, 120)
    assert (code, other) == (1, (0, None)), report
    real = [one for one in report["findings"] if one["severity"] != "note"]
    assert [one["name"] for one in real] == ["separate hosts"]  # which they are, on one machine
    assert real[0]["text"].startswith("rank 0 and rank 1 run on ")
    assert len({facts["extension"]["host_key"] for facts in report["ranks"]}) == 2
    assert report["self_test"]["1"]["wrong"] == {}
    interfaces = dict(report["ranks"][0]["extension"]["interfaces"][::-1])
    assert "eth0" in interfaces


@pytest.mark.nightly
def test_hosts_that_meet_and_cannot_connect(programs: RankPool, unused_port: int):
    """Each listens at an address to which the other has no way."""
    own = ["10.98.0.1", "10.99.0.1"]
    with Hosts(2) as hosts:
        for host, address in zip(hosts._hosts, own, strict=True):
            host.do(f"ip address add {address}/32 dev eth0")
        (code, report), other = reports(programs, hosts, unused_port, 12, own)
    assert (code, other) == (2, (0, None)), report
    found = [one for one in report["findings"] if one["name"] == "self-test"]
    assert {rank for one in found for rank in one["ranks"]} == {0, 1}
    assert any("open all ports between the hosts" in one["remedy"] for one in found), found


@pytest.mark.nightly
def test_a_host_that_nothing_reaches(programs: RankPool, unused_port: int):
    """Each side reports what it sees."""
    with Hosts(2) as hosts:
        hosts.blackhole(1)
        (code_0, of_0), (code_1, of_1) = reports(programs, hosts, unused_port, 2)
    assert (code_0, code_1) == (2, 2)
    texts = [one["text"] for report in (of_0, of_1) for one in report["findings"] if one["name"] == "missing ranks"]
    assert texts[0] == "rank 1 did not come"
    assert texts[1].startswith("rank 0 did not listen at 10.77.0.1:")
