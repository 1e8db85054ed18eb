"""The time that ``syncengine.Parallel`` adds to a step of a GPT of 100 M parameters, on the host and on the GPU.

python -m benchmarks.cuda_train_step                  8 sequences of 1024 tokens, autocast to bfloat16
python -m benchmarks.cuda_train_step --trace t.json   beside it a trace of two steps for chrome://tracing

One rank trains. The other holds its model and the memory that this rank's kernels read and write, but takes no steps:
its signals are faked (a build with test hooks does so where SYNCENGINE_TEST_FAKE_ARRIVALS is set), so that nobody
waits, and the device is one rank's alone. So the averages mean nothing; that all gradients went through the engine is
checked by its counters. A step is clearing the gradients, forward and backward. Turns of all peers are interleaved.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support import output, ranks, stats
from benchmarks.support.workloads import next_token_loss
from examples.gpt.model import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from cuda_ranks import why_no_gpu

PEERS = ("plain", "no_sync", "sync")
STEPS = 3  # a turn: the host may be ahead of the device, as in training
WARMUP = 5  # steps; buckets settle after the first ones


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank 0: measures, prints a table, writes a result file."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not options.worker:
        reason = why_no_gpu() or why_no_fakes()
        if reason:
            print(f"not run: {reason}")
            return 1
        os.environ["SYNCENGINE_TEST_FAKE_ARRIVALS"] = "1"
        return ranks.run_ranks("benchmarks.cuda_train_step", 2, "torchrun", [*argv, "--worker"])

    import syncengine

    rank, _ = ranks.join("torchrun")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    syncengine.init()
    torch.manual_seed(0)
    config = GPTConfig(options.vocabulary, options.sequence, options.layers, options.heads, options.width)
    plain = GPT(config).cuda()
    parallel = syncengine.Parallel(copy.deepcopy(plain))
    tokens = torch.randint(options.vocabulary, (options.batch, options.sequence + 1), device="cuda")
    for _ in range(WARMUP):
        step(parallel, tokens)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        report(plain, parallel, tokens, options)
    dist.barrier()
    syncengine.shutdown()
    dist.destroy_process_group()
    return 0


def why_no_fakes() -> str:
    """Why the peers can't be faked; empty if they can."""
    from syncengine import _C

    return "" if _C.has_test_hooks else "the extension has no test hooks: build it with SYNCENGINE_TEST_HOOKS=1"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--trace", type=Path, help="where to write a trace of two synchronized steps")
    parser.add_argument("--out", type=Path, default=output.RESULTS / "cuda_train_step.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    """Clears the gradients, then forward and backward; the optimizer is left out: it is the same for all."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()


def report(plain: nn.Module, parallel: nn.Module, tokens: torch.Tensor, options: argparse.Namespace) -> None:
    """Measures, prints a table, and writes the result file."""
    found = measure(plain, parallel, tokens, options.turns)
    parameters = sum(p.numel() for p in plain.parameters())
    results = [{"peer": peer} | {what: stats.summary(each) for what, each in found[peer].items()} for peer in PEERS]
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or Path(folder, "trace.json")
        trace(parallel, tokens, path)
        hidden = overlap(json.loads(path.read_text())["traceEvents"])
    shape = f"{parameters / 1e6:.1f} M parameters, {options.batch} x {options.sequence} tokens, bfloat16 by autocast"
    print(f"{shape}; {torch.cuda.get_device_name()}; one rank, the other's arrivals faked\n{table(results)}")
    print("goal on one H200: sync at most +3 % on the device and the host")
    if hidden is not None:
        print(f"of the engine's kernels {100 * hidden:.0f} % of the time ran beside others")
    facts = {"parameters": parameters, "device": torch.cuda.get_device_name(), "kernels hidden": hidden}
    facts |= {"asserts": "on"}
    output.save(options.out, "cuda_train_step", vars(options) | facts, results, cuda=torch.version.cuda)


def measure(
    plain: nn.Module, parallel: nn.Module, tokens: torch.Tensor, turns: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step of each peer: until the device has done it, and until the host has queued it."""
    found = {peer: {"device": [], "host": []} for peer in PEERS}
    expected = STEPS * sum(p.nbytes for p in plain.parameters())
    for turn in range(turns + 2):
        for peer in random.Random(turn).sample(PEERS, len(PEERS)):
            model = plain if peer == "plain" else parallel
            before = reduced_bytes(parallel)
            with parallel.no_sync() if peer == "no_sync" else contextlib.nullcontext():
                torch.cuda.synchronize()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start = time.perf_counter()
                begin.record()
                for _ in range(STEPS):
                    step(model, tokens)
                end.record()
                host = time.perf_counter() - start
                end.synchronize()
            moved = reduced_bytes(parallel) - before
            assert moved == (expected if peer == "sync" else 0), f"{peer}: the engine reduced {moved} bytes"
            if turn >= 2:  # the first ones warm up
                found[peer]["device"].append(begin.elapsed_time(end) / STEPS)
                found[peer]["host"].append(1000 * host / STEPS)
    return found


def reduced_bytes(model: nn.Module) -> int:
    """The bytes that the engine has reduced on devices so far."""
    counters = model.communicator.counters()
    return sum(counters.get(f"cuda_{way}_bytes", 0) for way in ("direct", "staged", "one_shot"))


def table(results: list[dict]) -> str:
    """Medians in milliseconds, and their difference to plain torch's."""
    base = results[PEERS.index("plain")]
    rows: list[tuple[str, ...]] = [("ms a step", "device", "over plain", "host", "over plain")]
    for result in results:
        row = [result["peer"]]
        for what in ("device", "host"):
            median, plain = result[what]["p50"], base[what]["p50"]
            row += [f"{median:.2f}", f"{100 * (median / plain - 1):+.1f} %"]
        rows.append(tuple(row))
    return output.table(rows)


def trace(model: nn.Module, tokens: torch.Tensor, path: Path) -> None:
    """Writes a trace of two synchronized steps to `path`, by torch's profiler."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for _ in range(2):
            step(model, tokens)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def overlap(events: list[dict]) -> float | None:
    """The part of the engine's kernels' time in which other kernels ran as well; None if the trace has none of them."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    own = [event for event in kernels if "syncengine" in event["name"]]
    others = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels if "syncengine" not in e["name"])
    total = sum(event["dur"] for event in own)
    if not total:
        return None
    beside = 0.0
    for event in own:
        begin, end = event["ts"], event["ts"] + event["dur"]
        reached = begin
        for first, last in others:
            if first >= end:
                break
            beside += max(0.0, min(last, end) - max(first, reached))
            reached = max(reached, min(last, end))
    return beside / total


if __name__ == "__main__":
    sys.exit(main())
