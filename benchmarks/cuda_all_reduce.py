"""All-reduce (avg, float32, in place) on one GPU, ranks as threads, beside the floor: a device-to-device copy.

python -m benchmarks.cuda_all_reduce                          2, 4 and 8 ranks, 8 B to 1 GiB
python -m benchmarks.cuda_all_reduce --ranks 2 --sizes 16Ki 64Mi

`empty` is memory of syncengine.empty, `tensor` any tensor. Up to 1 MiB a turn is a graph of 100 chained calls, so that
what the host does is not in it; above, calls one after the other. A turn's time is that of its slowest rank, by events
of its stream; results are checked after each turn. The floor copies one half of all ranks' bytes onto the other and
back: it moves as many bytes as reading and writing each once, on the same memory, with the whole device.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.support import output, stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cuda_ranks import run_threads, why_no_gpu

SIZES = ("8", "4Ki", "16Ki", "64Ki", "256Ki", "1Mi", "4Mi", "16Mi", "64Mi", "256Mi", "1Gi")
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
GRAPH_BYTES = 1 << 20  # up to here calls are chained in a graph
CHAIN = 100


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes a result file."""
    options = parse(argv)
    reason = why_no_gpu()
    if reason:
        print(f"not run: {reason}")
        return 1
    results = []
    for world in options.ranks:
        for size in options.sizes:
            if world * size <= torch.cuda.mem_get_info()[0] // 4:
                results += measure(world, size, options.turns)
                torch.cuda.empty_cache()
    print(table(results))
    device = {"device": torch.cuda.get_device_name(), "ranks are": "threads of one process on one GPU"}
    output.save(options.out, "cuda_all_reduce", vars(options) | device, results, cuda=torch.version.cuda)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[parse_size(size) for size in SIZES])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=output.RESULTS / "cuda_all_reduce.json")
    return parser.parse_args(argv)


def parse_size(text: str) -> int:
    """'4Ki' is 4096."""
    unit = UNITS.get(text[-2:], 1)
    return int(text.removesuffix(text[-2:]) if unit > 1 else text) * unit


def measure(world: int, size: int, turns: int) -> list[dict]:
    """Microseconds a call of each peer, and of the floor."""
    results = [{"peer": "floor", "ranks": world, "bytes": size, **stats.summary(floor(world, size, turns))}]
    for peer in ("empty", "tensor"):
        by_rank = run_threads(world, lambda rank, c, peer=peer: times(rank, c, peer, size, turns))
        slowest = [max(each) for each in zip(*by_rank, strict=True)]
        results.append({"peer": peer, "ranks": world, "bytes": size, **stats.summary(slowest)})
    return results


def times(rank: int, communicator, peer: str, size: int, turns: int) -> list[float]:
    """One rank's microseconds a call."""
    shape, device = [max(size // 4, 1)], torch.device("cuda")
    tensor = communicator.empty(shape, torch.float32, device) if peer == "empty" else torch.empty(shape, device=device)
    calls = CHAIN if size <= GRAPH_BYTES else max(1, min(20, (1 << 30) // size))

    def chain() -> None:
        for _ in range(calls):
            communicator.all_reduce(tensor, "avg")

    stream = torch.cuda.current_stream()
    tensor.fill_(float(rank))
    communicator.all_reduce(tensor, "avg")
    run = chain
    if size <= GRAPH_BYTES:
        run = captured(communicator, chain).replay
    found = []
    for turn in range(turns + 2):
        tensor.fill_(float(rank + turn))
        stream.synchronize()
        communicator.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        expected = sum(range(communicator.size)) / communicator.size + turn
        assert tensor.eq(expected).all(), f"{peer}: a wrong result at {size} bytes"
        if turn >= 2:  # the first ones warm up
            found.append(begin.elapsed_time(end) * 1000 / calls)
    return found


def captured(communicator, step) -> torch.cuda.CUDAGraph:
    """Capturing begins by waiting for the device: one rank at a time, and none has begun with what comes after."""
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    for turn in range(communicator.size):
        communicator.barrier()
        if turn == communicator.rank:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                step()
    communicator.barrier()
    return graph


def floor(world: int, size: int, turns: int) -> list[float]:
    """Microseconds for moving as many bytes by copies."""
    count = max(world * size // 4 // 2, 1)
    a, b = torch.zeros(count, device="cuda"), torch.zeros(count, device="cuda")
    calls = max(1, min(100, (1 << 30) // (world * size)))
    found = []
    for turn in range(turns + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            b.copy_(a)
            a.copy_(b)
        end.record()
        end.synchronize()
        if turn >= 2:
            found.append(begin.elapsed_time(end) * 1000 / calls)
    return found


def table(results: list[dict]) -> str:
    """Medians in microseconds, and how much of the floor's bandwidth each peer has."""
    rows: list[tuple[str, ...]] = [("ranks x bytes", "floor", "empty", "tensor", "empty / floor", "tensor / floor")]
    found = {(result["ranks"], result["bytes"], result["peer"]): result["p50"] for result in results}
    for world, size in dict.fromkeys((result["ranks"], result["bytes"]) for result in results):
        base, empty, tensor = (found[world, size, peer] for peer in ("floor", "empty", "tensor"))
        figures = [f"{base:.1f}", f"{empty:.1f}", f"{tensor:.1f}", f"{base / empty:.2f}", f"{base / tensor:.2f}"]
        rows.append((f"{world} x {size}", *figures))
    return output.table(rows)


if __name__ == "__main__":
    sys.exit(main())
