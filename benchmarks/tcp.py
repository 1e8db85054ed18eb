"""Goodput of the TCP transport between two ranks, both ways at once, beside a raw pump over the same number of sockets.

Over loopback, and over links that are limited in rate (network namespaces; needs root or user namespaces). All bytes
are compared. Runs take turns; the slower rank's time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .support.output import RESULTS, save, table
from .support.ranks import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
from hosts import INTERFACE, Hosts, why_not

PROGRAM = REPOSITORY / "build" / "core-plain" / "tcp_rank"
MODES = ("pump", "raw")


def start(hosts: Hosts | None, rank: int, words: list[str]) -> subprocess.Popen:
    """One rank: on host `rank`, or here."""
    command = [str(PROGRAM), str(rank), "2", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return hosts.start(rank, command, **pipes) if hosts else subprocess.Popen(command, **pipes)


def goodput(hosts: Hosts | None, mode: str, sockets: int, total: int) -> float:
    """Bytes per second each way, of the slower rank."""
    interface = INTERFACE if hosts else "lo"
    words = [mode, f"interface={interface}", f"sockets={sockets}", f"rounds={total >> 20}", "timeout=300"]
    ranks = [start(hosts, rank, words) for rank in range(2)]
    try:
        addresses = [rank.stdout.readline().removeprefix("address ") for rank in ranks]
        for rank in ranks:
            rank.stdin.write("".join(addresses))
            rank.stdin.flush()
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    slowest = []
    for output in outputs:
        pumped = [line.split() for line in output.splitlines() if line.startswith("pumped")]
        if not pumped or "done" not in output.splitlines():
            raise RuntimeError(f"{mode} failed: {output}")
        slowest.append(int(pumped[0][1]) / float(pumped[0][2]))
    return min(slowest)


@contextlib.contextmanager
def link(rate: str) -> Iterator[Hosts | None]:
    """Two hosts whose links carry `rate`, or this one's loopback."""
    if rate == "loopback":
        yield None
    else:
        with Hosts(2, rate) as hosts:
            yield hosts


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, and rates as tc spells them")
    parser.add_argument("--sockets", default="1,4")
    parser.add_argument("--mib", type=int, default=256, help="each way, each turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "tcp.json")
    options = parser.parse_args()
    subprocess.run(["make", "-s", "-C", str(REPOSITORY / "tests" / "core"), "tcp-rank", "EXTENSION="], check=True)
    results, rows = [], [("link", "sockets", "transport MB/s", "raw MB/s", "ratio")]
    for rate in options.links.split(","):
        if rate != "loopback" and (reason := why_not()):
            print(f"{rate}: skipped, {reason}")
            continue
        for sockets in map(int, options.sockets.split(",")):
            samples: dict[str, list[float]] = {mode: [] for mode in MODES}
            with link(rate) as hosts:
                for turn in range(options.turns):
                    for mode in MODES if turn % 2 else reversed(MODES):
                        samples[mode].append(goodput(hosts, mode, sockets, options.mib << 20))
            medians = {mode: statistics.median(samples[mode]) for mode in MODES}
            ratio = medians["pump"] / medians["raw"]
            rows.append((rate, str(sockets), *(f"{medians[mode] / 1e6:.1f}" for mode in MODES), f"{ratio:.3f}"))
            results.append({"link": rate, "sockets": sockets, "bytes_per_second": samples, "ratio_of_medians": ratio})
    print(table(rows))
    save(options.out, "tcp", vars(options), results)


if __name__ == "__main__":
    main()
