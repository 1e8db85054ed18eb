"""All-reduce (sum, float32, in place) of syncengine, Gloo and an MPI, beside the floor: scaling as many bytes in place.

python -m benchmarks.all_reduce                              2 ranks, syncengine and Gloo
python -m benchmarks.all_reduce --launcher openmpi           the same under mpirun, with Open MPI in the comparison
python -m benchmarks.all_reduce --ranks 4 --sizes 4Ki 25Mi   chosen sizes

All peers run in the same processes, in turns: in every round each has one, in an order drawn anew. A turn is one call,
of small messages ten. Before each call its input is rewritten, after it the result is checked. A call's time is that of
its slowest rank.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support import output, ranks, stats
from benchmarks.support.rounds import warm_up
from benchmarks.support.start_line import StartLine

SIZES = ("8", "64", "512", "4Ki", "16Ki", "64Ki", "256Ki", "1Mi", "4Mi", "16Mi", "25Mi", "64Mi", "256Mi")
PEERS = ("floor", "empty", "tensor", "gloo", "mpi")
MEANING = {
    "floor": "each rank scales the bytes in place",
    "empty": "syncengine, on memory from syncengine.empty",
    "tensor": "syncengine, on ordinary tensors",
    "gloo": "torch.distributed over Gloo",
    "mpi": "mpi4py's Allreduce(IN_PLACE) of the MPI that launched us",
}
WARMUP_ROUNDS = 3
SMALL = 64 * 2**10  # bytes; a single small call would mostly tell how cold the peer before it left the caches
CALLS_IN_TURN = 10  # of small messages
PERIOD = 251  # of the test pattern: a prime, so that pieces that end up in each other's place are noticed


@dataclass(frozen=True)
class Peer:
    """One way to reduce `tensor`, after which it holds `expected * factor`."""

    name: str
    tensor: Tensor
    call: Callable[[], object]
    expected: Tensor
    factor: float = 1.0


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.all_reduce", options.ranks, options.launcher, [*argv, "--worker"])

    rank, size = ranks.join(options.launcher)
    start_line = StartLine(rank, size)
    results = []
    for bytes_ in map(parse_size, options.sizes):
        rounds, samples = measure(make_peers(options.peers, rank, size, bytes_), start_line, options)
        results.append({"bytes": bytes_, "peers": {name: stats.summary(times) for name, times in samples.items()}})
        if rank == 0:
            print(f"{format_size(bytes_):>6}: {rounds} rounds, every result verified", flush=True)
    if rank == 0:
        report(results, options)
    leave(options.peers)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; `--worker` marks the processes that `main` starts."""
    parser = argparse.ArgumentParser(prog="benchmarks.all_reduce", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    parser.add_argument("--launcher", choices=ranks.LAUNCHERS, default="torchrun", help="default %(default)s")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes, Ki and Mi allowed; default: 8 to 256Mi")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all that the launcher offers")
    parser.add_argument("--seconds", type=float, default=10, help="to spend on each size; default %(default)s")
    parser.add_argument("--rounds", type=int, nargs=2, default=(10, 2000), metavar=("LEAST", "MOST"))
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/all_reduce-...json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peers is None:
        options.peers = [peer for peer in PEERS if peer != "mpi" or options.launcher != "torchrun"]
    elif "mpi" in options.peers and options.launcher == "torchrun":
        parser.error("the peer mpi needs --launcher openmpi or mpich")
    options.out = options.out or output.RESULTS / f"all_reduce-{options.ranks}ranks-{options.launcher}.json"
    return options


def parse_size(text: str) -> int:
    """Bytes: `4096`, `4Ki`, `25Mi`; whole float32 elements."""
    matched = re.fullmatch(r"(\d+)(Ki|Mi)?", text)
    if not matched or int(matched[1]) == 0 or (int(matched[1]) % 4 and not matched[2]):
        sys.exit(f"--sizes: {text!r} is not a positive multiple of 4 bytes such as 4096, 4Ki or 25Mi")
    return int(matched[1]) * {None: 1, "Ki": 2**10, "Mi": 2**20}[matched[2]]


def format_size(bytes_: int) -> str:
    """The inverse of parse_size, for whole units."""
    for unit, name in ((2**20, "Mi"), (2**10, "Ki")):
        if bytes_ % unit == 0:
            return f"{bytes_ // unit}{name}"
    return str(bytes_)


def pattern(elements: int, rank: int) -> Tensor:
    """Small integers over 8: sums over any few ranks are exact in any order, so each result has one right value."""
    period = ((torch.arange(PERIOD) * 7 + 31 * rank) % PERIOD - PERIOD // 2) / 8
    return period.repeat(elements // PERIOD + 1)[:elements].clone()


def make_peers(names: list[str], rank: int, size: int, bytes_: int) -> list[Peer]:
    """The chosen peers, each with memory of its own."""
    elements = bytes_ // 4
    total = sum((pattern(elements, other) for other in range(size)), torch.zeros(elements))
    peers = []
    for name in names:
        tensor = torch.empty(elements)
        if name == "floor":
            peers.append(Peer(name, tensor, lambda t=tensor: t.mul_(0.5), pattern(elements, rank), factor=0.5))
        elif name == "gloo":
            peers.append(Peer(name, tensor, lambda t=tensor: dist.all_reduce(t), total))
        elif name == "mpi":
            from mpi4py import MPI

            array, world = tensor.numpy(), MPI.COMM_WORLD
            peers.append(Peer(name, tensor, lambda a=array, w=world: w.Allreduce(MPI.IN_PLACE, a), total))
        else:
            import syncengine

            syncengine.init()
            tensor = syncengine.empty(elements, dtype=torch.float32) if name == "empty" else tensor
            peers.append(Peer(name, tensor, lambda t=tensor: syncengine.all_reduce(t), total))
    return peers


def measure(peers: list[Peer], start_line: StartLine, options: argparse.Namespace) -> tuple[int, dict[str, Tensor]]:
    """The number of rounds, and each peer's microseconds of the slowest rank, call by call."""
    source = pattern(len(peers[0].tensor), dist.get_rank())
    play = partial(one_round, peers=peers, source=source, start_line=start_line)
    rounds = warm_up(play, WARMUP_ROUNDS, options.seconds, options.rounds)
    durations = torch.tensor([play(round_) for round_ in range(rounds)])
    columns = ranks.slowest(durations).double().div(1e3).transpose(0, 1).flatten(1).numpy()
    return rounds, {peer.name: column for peer, column in zip(peers, columns, strict=True)}


def one_round(round_: int, peers: list[Peer], source: Tensor, start_line: StartLine) -> list[list[int]]:
    """This rank's nanoseconds of the calls of each peer, in the order of `peers`."""
    nanoseconds: list[list[int]] = [[] for _ in peers]
    calls = CALLS_IN_TURN if source.nbytes <= SMALL else 1
    for index in random.Random(round_).sample(range(len(peers)), len(peers)):  # the same order on all ranks
        peer = peers[index]
        for call in range(calls):
            # Another input each time: a result left over from the last call would be noticed.
            scale = 2.0 ** ((round_ + call) % 5 - 2)
            torch.mul(source, scale, out=peer.tensor)
            start_line.wait()
            begin = time.perf_counter_ns()
            peer.call()
            nanoseconds[index].append(time.perf_counter_ns() - begin)
            if not torch.equal(peer.tensor.mul_(1 / (scale * peer.factor)), peer.expected):
                raise AssertionError(f"{peer.name}: wrong sum of {source.nbytes} bytes in round {round_}")
    return nanoseconds


def report(results: list[dict], options: argparse.Namespace) -> None:
    """Two tables on the terminal, and the result file."""
    names = list(results[0]["peers"])
    rows = [("bytes", *names)]
    for result in results:
        cells = [result["peers"][name] for name in names]
        rows.append((format_size(result["bytes"]), *(f"{c['p50']:.1f} ({c['p10']:.1f}-{c['p90']:.1f})" for c in cells)))
    print(f"\nmedian (10th to 90th percentile), microseconds; {options.ranks} ranks\n{output.table(rows)}\n")
    print("\n".join(f"{name:<8}{MEANING[name]}" for name in names))

    ratios = [(a, b) for b in ("empty", "tensor") for a in ("floor", "gloo", "mpi") if a in names and b in names]
    if ratios:
        rows = [("bytes", *(f"{b}/floor" if a == "floor" else f"{a}/{b}" for a, b in ratios))]
        for result in results:
            medians = {name: result["peers"][name]["p50"] for name in names}
            cells = [medians[b] / medians[a] if a == "floor" else medians[a] / medians[b] for a, b in ratios]
            rows.append((format_size(result["bytes"]), *(f"{cell:.2f}" for cell in cells)))
        print(f"\nratios of the medians\n{output.table(rows)}")

    versions = {}
    if "mpi" in names:
        from mpi4py import MPI

        versions["mpi"] = MPI.Get_library_version().split("\n")[0].strip()
    output.save(options.out, "all_reduce", vars(options), results, **versions)


def leave(peers: list[str]) -> None:
    """Ends what the ranks joined, in the reverse order."""
    dist.barrier()
    if {"empty", "tensor"} & set(peers):
        import syncengine

        syncengine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
