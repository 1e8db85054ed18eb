"""Collectives through torch.distributed: the backend "syncengine" beside Gloo, and a concurrent copy as the floor.

python -m benchmarks.c10d                                       2 ranks, all_reduce, reduce_scatter and all_gather
python -m benchmarks.c10d --calls broadcast all_to_all --ranks 4

Both backends run in the same processes, in turns, on ordinary tensors: see benchmarks.all_reduce, of which this has the
method. Bytes are those of the largest tensor of the call.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_reduce import CALLS_IN_TURN, SIZES, SMALL, WARMUP_ROUNDS, format_size, parse_size, pattern
from benchmarks.support import output, ranks, stats
from benchmarks.support.rounds import warm_up
from benchmarks.support.start_line import StartLine

CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
STANDARD = CALLS[:3]
PEERS = ("floor", "gloo", "syncengine")


@dataclass(frozen=True)
class Job:
    """One call on `input`, after which `result` holds `expected`; all scale with the input."""

    name: str
    input: Tensor
    result: Tensor
    call: Callable[[], object]
    expected: Tensor


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.c10d", options.ranks, "torchrun", [*argv, "--worker"])

    import syncengine  # noqa: F401  (registers the backend)

    rank, size = ranks.join("torchrun")
    groups = {"gloo": dist.group.WORLD, "syncengine": dist.new_group(backend="syncengine")}
    start_line = StartLine(rank, size)
    results = []
    for call in options.calls:
        for bytes_ in map(parse_size, options.sizes):
            elements = max(bytes_ // 4 // size, 1) * size
            jobs = [make_job(call, peer, groups.get(peer), rank, size, elements) for peer in PEERS]
            rounds, samples = measure(jobs, start_line, options)
            summaries = {name: stats.summary(times) for name, times in samples.items()}
            results.append({"call": call, "bytes": elements * 4, "peers": summaries})
            if rank == 0:
                print(f"{call} {format_size(elements * 4)}: {rounds} rounds, every result verified", flush=True)
    if rank == 0:
        report(results, options)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; `--worker` marks the processes that `main` starts."""
    parser = argparse.ArgumentParser(prog="benchmarks.c10d", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=STANDARD, help="default: %(default)s")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes, Ki and Mi allowed; default: 8 to 256Mi")
    parser.add_argument("--seconds", type=float, default=5, help="to spend on each size; default %(default)s")
    parser.add_argument("--rounds", type=int, nargs=2, default=(10, 2000), metavar=("LEAST", "MOST"))
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/c10d-...json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out or output.RESULTS / f"c10d-{options.ranks}ranks.json"
    return options


def make_job(call: str, peer: str, group: dist.ProcessGroup | None, rank: int, size: int, elements: int) -> Job:
    """`call` of `peer`, with memory of its own. The floor copies what every rank must at least write."""
    part = elements // size
    inputs = [pattern(elements, other) for other in range(size)]
    mine = torch.empty(part if call == "all_gather" else elements)
    inputs = [full[: len(mine)] for full in inputs]
    if call == "all_reduce":
        result, expected, run = mine, sum(inputs), lambda: dist.all_reduce(mine, group=group)
    elif call == "reduce_scatter":
        result, expected = torch.empty(part), sum(inputs).chunk(size)[rank]
        run = lambda: dist.reduce_scatter_tensor(result, mine, group=group)  # noqa: E731
    elif call == "all_gather":
        result, expected = torch.empty(elements), torch.cat(inputs)
        run = lambda: dist.all_gather_into_tensor(result, mine, group=group)  # noqa: E731
    elif call == "broadcast":
        result, expected, run = mine, inputs[0], lambda: dist.broadcast(mine, 0, group=group)
    elif call == "all_to_all":
        result, expected = torch.empty(elements), torch.cat([full.chunk(size)[rank] for full in inputs])
        run = lambda: dist.all_to_all_single(result, mine, group=group)  # noqa: E731
    else:  # send: around the ring
        result, expected = torch.empty(elements), inputs[rank - 1]
        operations = [(dist.isend, mine, (rank + 1) % size), (dist.irecv, result, (rank - 1) % size)]
        run = lambda: [  # noqa: E731
            work.wait() for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in operations])
        ]
    if peer == "floor":
        source, target = torch.empty(len(result)), torch.empty(len(result))
        return Job(peer, source, target, lambda: target.copy_(source), pattern(len(result), rank))
    return Job(peer, mine, result, run, expected)


def measure(jobs: list[Job], start_line: StartLine, options: argparse.Namespace) -> tuple[int, dict[str, Tensor]]:
    """The number of rounds, and each peer's microseconds of the slowest rank, call by call."""
    sources = [pattern(len(job.input), dist.get_rank()) for job in jobs]
    play = partial(one_round, jobs=jobs, sources=sources, start_line=start_line)
    rounds = warm_up(play, WARMUP_ROUNDS, options.seconds, options.rounds)
    durations = torch.tensor([play(round_) for round_ in range(rounds)])
    columns = ranks.slowest(durations).double().div(1e3).transpose(0, 1).flatten(1).numpy()
    return rounds, {job.name: column for job, column in zip(jobs, columns, strict=True)}


def one_round(round_: int, jobs: list[Job], sources: list[Tensor], start_line: StartLine) -> list[list[int]]:
    """This rank's nanoseconds of the calls of each peer, in the order of `jobs`."""
    nanoseconds: list[list[int]] = [[] for _ in jobs]
    calls = CALLS_IN_TURN if max(job.result.nbytes for job in jobs) <= SMALL else 1
    for index in random.Random(round_).sample(range(len(jobs)), len(jobs)):  # the same order on all ranks
        job = jobs[index]
        for call in range(calls):
            # Another input each time: a result left over from the last call would be noticed.
            scale = 2.0 ** ((round_ + call) % 5 - 2)
            torch.mul(sources[index], scale, out=job.input)
            start_line.wait()
            begin = time.perf_counter_ns()
            job.call()
            nanoseconds[index].append(time.perf_counter_ns() - begin)
            if not torch.equal(job.result * (1 / scale), job.expected):
                raise AssertionError(f"{job.name}: wrong result of {job.result.nbytes} bytes in round {round_}")
    return nanoseconds


def report(results: list[dict], options: argparse.Namespace) -> None:
    """A table on the terminal, and the result file."""
    rows = [("call", "bytes", *PEERS, "gloo/syncengine", "syncengine/floor")]
    for result in results:
        cells = [result["peers"][name] for name in PEERS]
        medians = {name: result["peers"][name]["p50"] for name in PEERS}
        ratios = medians["gloo"] / medians["syncengine"], medians["syncengine"] / medians["floor"]
        rows.append(
            (
                result["call"],
                format_size(result["bytes"]),
                *(f"{c['p50']:.1f} ({c['p10']:.1f}-{c['p90']:.1f})" for c in cells),
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    print(f"\nmedian (10th to 90th percentile), microseconds; {options.ranks} ranks\n{output.table(rows)}")
    output.save(options.out, "c10d", vars(options), results)


if __name__ == "__main__":
    sys.exit(main())
