"""All-reduce (sum) between hosts, beside Gloo and a raw pump that moves as many bytes as the sum must.

python -m benchmarks.hosts                              2 hosts on a link of 1 Gbit/s, made of network namespaces
python -m benchmarks.hosts --hosts 4 --numerics ring    more of them, another mode
python -m benchmarks.hosts --rate none                  2 virtual hosts on the loopback interface: what the CPU can move
python -m benchmarks.hosts --ranks-per-host 2 --dtype bfloat16 --peers tensor fast pump gloo    what another mode gains

With n hosts, the pump sends 2 (n - 1) / n of the tensor's bytes from each host to the next one, over as many
connections as we have, and receives as many from the one before: no all-reduce can take less. The ranks of a host share
these bytes. All peers take turns, in an order drawn anew each round; each result is checked. Bytes are counted at each
host's interface. Namespaces need root, `ip`, `tc`.
"""

import argparse
import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import syncengine
from benchmarks.all_reduce import format_size, parse_size, pattern
from benchmarks.support import output, ranks, stats
from benchmarks.support.rounds import warm_up
from benchmarks.support.start_line import StartLine
from syncengine.config import NUMERICS, Config
from syncengine.groups import communicator_of
from tests.support.hosts import INTERFACE, Hosts

PEERS = ("pump", "tensor", "gloo")
MEANING = {
    "pump": "raw sockets: 2 (n - 1) / n of the bytes to the next host and from the one before",
    "tensor": "syncengine, on ordinary tensors",
    "gloo": "torch.distributed over Gloo",
} | {mode: f"as tensor, by another communicator with numerics={mode}" for mode in NUMERICS}
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class Peer:
    """One way to move `tensor`, made of `source` times a factor; what `call` returns must be `expected` times it."""

    name: str
    source: Tensor
    tensor: Tensor
    call: Callable[[], Tensor]
    expected: Tensor


class Pump:
    """Connections to the rank of the same place on the next host, and from the one before; hosts have `each` ranks."""

    def __init__(self, rank: int, size: int, each: int, connections: int) -> None:
        address = socket.getaddrinfo(own_address(), 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[4][:2], family=address[0], backlog=connections) as server:
            where: list = [None] * size
            dist.all_gather_object(where, server.getsockname()[:2])
            self._out = [socket.create_connection(where[(rank + each) % size]) for _ in range(connections)]
            self._in = [server.accept()[0] for _ in range(connections)]

        for connection in [*self._out, *self._in]:
            connection.setblocking(False)

    def move(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Sends the one and receives the other, at once, an equal share by each connection."""
        send, receive = (memoryview(tensor.view(torch.uint8).numpy()) for tensor in (outgoing, incoming))
        share = -(-len(send) // len(self._out))
        rest = {c: send[i * share : (i + 1) * share] for i, c in enumerate(self._out)}
        rest |= {c: receive[i * share : (i + 1) * share] for i, c in enumerate(self._in)}
        while rest := {connection: memory for connection, memory in rest.items() if memory}:
            waiting = select.select([c for c in self._in if c in rest], [c for c in self._out if c in rest], [])
            for connection in waiting[0]:
                got = connection.recv_into(rest[connection])
                if got == 0:
                    raise ConnectionError("the pump's peer has gone")
                rest[connection] = rest[connection][got:]
            for connection in waiting[1]:
                rest[connection] = rest[connection][connection.send(rest[connection]) :]


def own_address() -> str:
    """The address at which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def main(argv: list[str] | None = None) -> int:
    """Parent: makes hosts and starts the ranks of each. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.worker:
        return work(options)
    with contextlib.ExitStack() as stack:
        hosts = None if options.rate == "none" else stack.enter_context(Hosts(options.hosts, options.rate))
        port = 29511 if hosts else unused_port()
        size = options.hosts * options.ranks_per_host
        processes = [start(rank, hosts, port, options, [*argv, "--worker"]) for rank in range(size)]
        try:
            return exit_status(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


def unused_port() -> int:
    """A port of this host that nobody used a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def exit_status(processes: list[subprocess.Popen]) -> int:
    """The exit status of all processes: 0 once all have ended well, or that of the first one that has not.

    It does not wait for the others then, since they may wait for that one.
    """
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return max(abs(code or 0) for code in codes)
        time.sleep(0.05)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; `--worker` marks the processes that `main` starts."""
    parser = argparse.ArgumentParser(prog="benchmarks.hosts", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, help="default %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc spells it; none: loopback, without limit")
    parser.add_argument("--numerics", choices=NUMERICS, default="rank_order", help="of the peer tensor")
    parser.add_argument("--sockets", type=int, default=4, help="connections a peer; default %(default)s")
    parser.add_argument("--sizes", nargs="+", default=("64Ki", "1Mi", "4Mi", "64Mi"), help="bytes, Ki and Mi allowed")
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, *NUMERICS), default=list(PEERS))
    parser.add_argument("--seconds", type=float, default=20, help="to spend on each size; default %(default)s")
    parser.add_argument("--rounds", type=int, nargs=2, default=(5, 200), metavar=("LEAST", "MOST"))
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/hosts-...json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.hosts < 2 or options.ranks_per_host < 1:
        parser.error("--hosts must be at least 2, and --ranks-per-host at least 1")
    each = f"x{options.ranks_per_host}" if options.ranks_per_host > 1 else ""
    dtype = f"-{options.dtype}" if options.dtype != "float32" else ""
    name = f"hosts-{options.hosts}{each}-{options.rate}-{options.numerics}{dtype}.json"
    options.out = options.out or output.RESULTS / name
    return options


def start(
    rank: int, hosts: Hosts | None, port: int, options: argparse.Namespace, arguments: list[str]
) -> subprocess.Popen:
    """Starts one rank on its host."""
    host, local = divmod(rank, options.ranks_per_host)
    environ = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.hosts * options.ranks_per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(options.ranks_per_host),
        "MASTER_ADDR": "127.0.0.1" if hosts is None else "10.77.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if hosts is None else INTERFACE,
        "SYNCENGINE_HOST_ID": str(host),
    }
    command = [sys.executable, "-m", "benchmarks.hosts", *arguments]
    if hosts is None:
        return subprocess.Popen(command, cwd=ranks.REPOSITORY, env=environ)
    return hosts.start(host, command, cwd=ranks.REPOSITORY, env=environ)


def work(options: argparse.Namespace) -> int:
    """Measures all sizes on one rank; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    syncengine.init(numerics=options.numerics, sockets=options.sockets)
    calls: dict[str, Callable[[Tensor], object]] = {"tensor": syncengine.all_reduce, "gloo": dist.all_reduce}
    for mode in [name for name in options.peers if name in NUMERICS]:
        config = Config.read(os.environ, numerics=mode, sockets=options.sockets)
        calls[mode] = communicator_of(dist.new_group(), config).all_reduce
    rank, size = dist.get_rank(), dist.get_world_size()
    pump, start_line = Pump(rank, size, options.ranks_per_host, options.sockets), StartLine(rank, size)
    results = []
    for bytes_ in map(parse_size, options.sizes):
        peers = make_peers(options, calls, rank, size, bytes_, pump)
        rounds, samples, sent = measure(peers, start_line, options)
        on_paper = 2 * (options.hosts - 1) / options.hosts * bytes_
        times = {name: stats.summary(values) for name, values in samples.items()}
        shares = {name: value / on_paper for name, value in sent.items()}
        first, *others = samples
        ratios = {f"{first}/{name}": stats.median_interval(samples[first] / samples[name]) for name in others}
        results.append({"bytes": bytes_, "rounds": rounds, "peers": times, "ratios": ratios, "sent_over_paper": shares})
        if rank == 0:
            print(f"{format_size(bytes_):>6}: {rounds} rounds, every result verified", flush=True)
    if rank == 0:
        report(results, options)
    dist.barrier()
    syncengine.shutdown()
    dist.destroy_process_group()
    return 0


def values(elements: int, rank: int, size: int, dtype: str) -> Tensor:
    """Whole numbers up to 250 / size: bfloat16 has all up to 256, so each sum over ranks has one right value."""
    return (pattern(elements, rank) * 16 / size).trunc().to(getattr(torch, dtype))


def make_peers(
    options: argparse.Namespace,
    calls: dict[str, Callable[[Tensor], object]],
    rank: int,
    size: int,
    bytes_: int,
    pump: Pump,
) -> list[Peer]:
    """The chosen peers, each with memory of its own."""
    elements = bytes_ // getattr(torch, options.dtype).itemsize
    of = partial(values, elements, size=size, dtype=options.dtype)
    own = of(rank)
    total = sum((of(other) for other in range(size)), torch.zeros_like(own))
    peers = []
    for name in options.peers:
        tensor = torch.empty_like(own)
        if name == "pump":
            moved = 2 * (options.hosts - 1) * elements // size
            tensor, incoming = own.new_empty(moved), own.new_empty(moved)
            before = of((rank - options.ranks_per_host) % size).repeat(2)[:moved]

            def call(tensor: Tensor = tensor, incoming: Tensor = incoming) -> Tensor:
                pump.move(tensor, incoming)
                return incoming

            peers.append(Peer(name, own.repeat(2)[:moved].clone(), tensor, call, before))
        else:

            def call(tensor: Tensor = tensor, reduce: Callable[[Tensor], object] = calls[name]) -> Tensor:
                reduce(tensor)
                return tensor

            peers.append(Peer(name, own, tensor, call, total))
    return peers


def measure(
    peers: list[Peer], start_line: StartLine, options: argparse.Namespace
) -> tuple[int, dict[str, Tensor], dict[str, float]]:
    """Rounds; each peer's microseconds of the slowest rank, call by call; the most bytes a host sent for a call."""
    sent = torch.zeros(len(peers), dtype=torch.float64)
    play = partial(one_round, peers=peers, start_line=start_line, sent=sent)
    rounds = warm_up(play, WARMUP_ROUNDS, options.seconds, options.rounds)
    sent.zero_()
    durations = torch.tensor([play(round_) for round_ in range(rounds)])
    columns = ranks.slowest(durations).double().div(1e3).transpose(0, 1).numpy()
    most_sent = ranks.slowest(sent / rounds).tolist()
    names = [peer.name for peer in peers]
    return rounds, dict(zip(names, columns, strict=True)), dict(zip(names, most_sent, strict=True))


def one_round(round_: int, peers: list[Peer], start_line: StartLine, sent: Tensor) -> list[int]:
    """This rank's nanoseconds of one call of each peer; adds to `sent` the bytes that its interface sent."""
    nanoseconds = [0] * len(peers)
    scale = 2.0 ** (round_ % 5 - 2)  # another input each time: a result left over from the last call would be noticed
    for index in random.Random(round_).sample(range(len(peers)), len(peers)):  # the same order on all ranks
        peer = peers[index]
        torch.mul(peer.source, scale, out=peer.tensor)
        before = interface_bytes()  # in front of the line, behind which another rank of this host may already send
        start_line.wait()
        begin = time.perf_counter_ns()
        result = peer.call()
        nanoseconds[index] = time.perf_counter_ns() - begin
        start_line.wait()
        sent[index] += interface_bytes() - before
        if not torch.equal(result / scale, peer.expected):
            raise AssertionError(f"{peer.name}: a wrong result of {peer.tensor.nbytes} bytes in round {round_}")
    return nanoseconds


def interface_bytes() -> int:
    """The bytes that this host's interface has sent; with loopback, those of all ranks."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{name}:"))
    return int(fields[8])


def report(results: list[dict], options: argparse.Namespace) -> None:
    """Two tables on the terminal, and the result file."""
    names = options.peers
    first, *others = names
    rows = [("bytes", *(f"{name}, ms" for name in names))]
    ratios = [("bytes", *(f"{first}/{name}" for name in others), *(f"sent by {name}" for name in names))]
    for result in results:
        size, times = format_size(result["bytes"]), [result["peers"][name] for name in names]
        rows.append((size, *(f"{t['p50'] / 1e3:.2f} ({t['p10'] / 1e3:.2f}-{t['p90'] / 1e3:.2f})" for t in times)))
        cells = (f"{median:.2f} ({lower:.2f}-{upper:.2f})" for median, lower, upper in result["ratios"].values())
        ratios.append((size, *cells, *(f"{result['sent_over_paper'][name]:.3f}" for name in names)))
    hosts = f"{options.hosts} hosts of {options.ranks_per_host}, rate {options.rate}"
    print(f"\nmedian (10th to 90th percentile); {hosts}, {options.dtype}, {options.numerics}\n{output.table(rows)}\n")
    print("\n".join(f"{name:<12}{MEANING[name]}" for name in names))
    print(f"\n{first}'s time over another's, median of the rounds (95 % interval);")
    print(f"bytes sent by the busiest host over those on paper\n{output.table(ratios)}")
    output.save(options.out, "hosts", vars(options), results)


if __name__ == "__main__":
    sys.exit(main())
