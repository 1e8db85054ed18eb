"""All-reduce (avg, float32, in place) on GPUs, beside the floor, which is device-to-device copies, and beside NCCL.

python -m benchmarks.cuda_all_reduce                          2, 4 and 8 ranks, 8 B to 1 GiB
python -m benchmarks.cuda_all_reduce --ranks 2 --sizes 16Ki 64Mi

Ranks are threads on one GPU, and processes with a GPU each where there are so many: NCCL needs that. `empty` is memory
of syncengine.empty, `tensor` any tensor. A turn is a graph of chained calls, so that the host's own time is not in it.
Turns of all peers are interleaved. A turn's time is that of its slowest rank, by events of its stream; results are
checked after each turn, and written after each size. The floor copies, with the whole device, as many bytes as the
direct path must read and write: (3 - 1/n) of a tensor for each of n ranks.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import syncengine
from benchmarks.support import output, stats
from benchmarks.support.cuda_threads import run_threads
from benchmarks.support.cuda_turns import Chain, Floor, Times, buffer, times
from syncengine import _C

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from cuda_ranks import run_processes, why_no_gpu

SIZES = ("8", "4Ki", "16Ki", "64Ki", "256Ki", "1Mi", "4Mi", "16Mi", "64Mi", "256Mi", "1Gi")
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
PEERS = ("floor", "empty", "tensor", "nccl")


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes a result file."""
    options = parse(argv)
    reason = why_no_gpu()
    if reason:
        print(f"not run: {reason}")
        return 1
    left_out = [ranks for ranks in options.ranks if ranks > torch.cuda.device_count()]
    facts = {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "ranks with a GPU each, and NCCL, not run": left_out,
        "test hooks": _C.has_test_hooks,
    }
    results = []
    for found in measurements(options):
        results += found
        output.save(options.out, "cuda_all_reduce", vars(options) | facts, results, cuda=torch.version.cuda)
    print(table(results))
    if left_out:
        print(f"\nnot run: NCCL and {left_out} ranks with a GPU each; GPUs here: {torch.cuda.device_count()}")
    print(*goals(results), sep="\n")
    return 0


def measurements(options: argparse.Namespace) -> Iterator[list[dict]]:
    """The results of a size, or of all sizes with a GPU each, whenever there are new ones."""
    for size in options.sizes:
        for ranks in options.ranks:
            yield measure_threads(ranks, size, options.turns)
    for ranks in options.ranks:
        if 1 < ranks <= torch.cuda.device_count():
            yield measure_processes(ranks, options.sizes, options.turns)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[parse_size(size) for size in SIZES])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=output.RESULTS / "cuda_all_reduce.json")
    return parser.parse_args(argv)


def parse_size(text: str) -> int:
    """The bytes that a text such as '4Ki' means: 4096."""
    unit = UNITS.get(text[-2:], 1)
    return int(text.removesuffix(text[-2:]) if unit > 1 else text) * unit


def measure_threads(ranks: int, size: int, turns: int) -> list[dict]:
    """Measures ranks as threads on one GPU, if it has room for their memory."""
    if 4 * ranks * size > torch.cuda.mem_get_info()[0] // 2:
        print(f"not run: {ranks} ranks x {size} bytes on one GPU, for want of memory")
        return []
    by_rank = run_threads(ranks, functools.partial(on_thread, size=size, turns=turns))
    torch.cuda.empty_cache()
    return summaries(by_rank, ranks=ranks, gpus=1, bytes=size)


def on_thread(rank: int, communicator: Any, size: int, turns: int) -> Times:
    """The times of one rank. Only rank 0 has the floor."""
    floor = {"floor": Floor(communicator.size, communicator.size, size)} if rank == 0 else {}
    return times(communicator, ours(communicator, size) | floor, PEERS[:-1], turns)


def measure_processes(ranks: int, sizes: list[int], turns: int) -> list[dict]:
    """Measures ranks as processes with a GPU each."""
    body = functools.partial(on_gpu, sizes=sizes, turns=turns)
    by_rank = run_processes(ranks, body)
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(by_rank) if isinstance(found, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [
        result
        for index, size in enumerate(sizes)
        for result in summaries([found[index] for found in by_rank], ranks=ranks, gpus=ranks, bytes=size)
    ]


def on_gpu(rank: int, sizes: list[int], turns: int) -> list[Times]:
    """The times of one rank, by size. The floor is that of its GPU alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    communicator = syncengine.init()
    ranks = communicator.size
    nccl = functools.partial(dist.all_reduce, op=dist.ReduceOp.AVG)
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for size in sizes:
            peers = ours(communicator, size) | {"nccl": Chain(nccl, buffer(size)), "floor": Floor(ranks, 1, size)}
            found.append(times(communicator, peers, PEERS, turns))
    torch.cuda.synchronize()
    syncengine.shutdown()
    dist.destroy_process_group()
    return found


def ours(communicator: Any, size: int) -> dict[str, Chain | Floor]:
    """The engine's peers."""
    average = functools.partial(communicator.all_reduce, op="avg")
    empty = communicator.empty(buffer(size).shape, torch.float32, torch.device("cuda"))
    return {"empty": Chain(average, empty), "tensor": Chain(average, buffer(size))}


def summaries(by_rank: list[Times], **where: int) -> list[dict]:
    """Each peer's microseconds a call, of the slowest rank of each turn."""
    results = []
    for peer in (peer for peer in PEERS if peer in by_rank[0]):
        turns = zip(*(found[peer] for found in by_rank if peer in found), strict=True)
        results.append({"peer": peer, **where, **stats.summary([max(turn) for turn in turns])})
    return results


def table(results: list[dict]) -> str:
    """Medians in microseconds, and how many times faster than the floor and NCCL the engine is."""
    rows: list[tuple[str, ...]] = [("ranks, GPUs, bytes", *PEERS, "floor / empty", "floor / tensor", "nccl / tensor")]
    found = {(r["ranks"], r["gpus"], r["bytes"], r["peer"]): r["p50"] for r in results}
    for where in dict.fromkeys(key[:-1] for key in found):
        of = {peer: found.get((*where, peer)) for peer in PEERS}
        figures = [f"{of[peer]:.1f}" if of[peer] else "not run" for peer in PEERS]
        for above, below in (("floor", "empty"), ("floor", "tensor"), ("nccl", "tensor")):
            figures.append(f"{of[above] / of[below]:.2f}" if of[above] else "")
        rows.append(("{}, {}, {}".format(*where), *figures))
    return output.table(rows)


def goals(results: list[dict]) -> list[str]:
    """Lines that compare the goals for one H200 with the results: with `empty`, ranks as threads."""
    found = {(r["ranks"], r["bytes"], r["peer"]): r["p50"] for r in results if r["gpus"] == 1}
    sizes = {(ranks, size) for ranks, size, _ in found}
    shares = [found[(*key, "floor")] / found[(*key, "empty")] for key in sizes if key[1] >= 64 << 20]
    small = [found[(*key, "empty")] for key in sizes if key[0] == 2 and key[1] <= 16 << 10]
    lines = []
    if shares:
        lines.append(f"of the floor's bandwidth from 64 MiB on: at least {min(shares):.2f} (goal: 0.90)")
    if small:
        lines.append(f"2 ranks, up to 16 KiB, in a graph: at most {max(small):.1f} us (goal: 8)")
    return lines


if __name__ == "__main__":
    sys.exit(main())
