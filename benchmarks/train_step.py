"""The cost of data parallelism in a training step: syncengine.Parallel and DDP over Gloo beside plain torch.

python -m benchmarks.train_step                       all models, 2 ranks
python -m benchmarks.train_step --models mlp gpt      some
python -m benchmarks.train_step --pairs 20            quicker
python -m benchmarks.train_step --engines syncengine nonfinite traced

The same model is trained by all engines in the same processes, their steps interleaved. Each batch is run twice, with
and without synchronization; the overhead is the difference of both, each at its slowest rank. The parameters that
syncengine and DDP trained must agree in every bit at the end.
"""

import argparse
import contextlib
import functools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import arguments, output, ranks, stats
from benchmarks.support.start_line import StartLine
from benchmarks.support.workloads import WORKLOADS, Workload

ENGINES = ("plain", "waiting", "syncengine", "nonfinite", "traced", "ddp", "backend")
ON_DEMAND = ("nonfinite", "traced")  # measured only if they are asked for
MEANING = {
    "plain": "torch without any wrapper",
    "waiting": "the same; after backward the ranks wait for each other: an engine of no cost",
    "syncengine": "syncengine.Parallel",
    "nonfinite": 'syncengine.Parallel(nonfinite="raise")',
    "traced": "syncengine.Parallel while a trace is recorded",
    "ddp": "DistributedDataParallel over Gloo",
    "backend": "DistributedDataParallel over the torch.distributed backend syncengine",
}
OURS = ("syncengine", "nonfinite", "traced")
TRAINED = (*OURS, "ddp", "backend")  # to the same bits
WARMUP_PAIRS = 5  # gradient buckets settle after the first steps
BATCHES = 8  # different ones, used in turn


@dataclass
class Trainee:
    """One engine's copy of the model, and this rank's seconds."""

    engine: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sync: list[float] = field(default_factory=list)
    no_sync: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)  # the part of the step that ends with the model's output
    sync_faults: list[float] = field(default_factory=list)  # pages that the kernel had to bring, in each step
    no_sync_faults: list[float] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)  # bytes by their way, of the last synchronized step
    loss: float = 0.0

    def timed(self, workload: Workload, batch: tuple[Tensor, Tensor], synchronize: bool, start_line: StartLine) -> None:
        """Clears the gradients, then forward and backward; the optimizer is left out: it is the same for all."""
        quiet = self.engine in TRAINED and not synchronize
        inputs, targets = batch
        traced = self.engine == "traced"
        with (
            self.model.no_sync() if quiet else contextlib.nullcontext(),
            recorded() if traced else contextlib.nullcontext(),
        ):
            faults, counters = page_faults(), self.counters()
            start_line.wait()
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            start = time.perf_counter()
            outputs = self.model(inputs)
            forward = time.perf_counter() - start
            loss = workload.loss(outputs, targets)
            loss.backward()
            if self.engine == "waiting" and synchronize:
                start_line.wait()
            seconds = time.perf_counter() - begin
        (self.sync if synchronize else self.no_sync).append(seconds)
        if synchronize or self.engine == "plain":
            self.forward.append(forward)
        (self.sync_faults if synchronize else self.no_sync_faults).append(page_faults() - faults)
        if synchronize:
            self.loss = loss.item()
            self.moved = {name: bytes_ - counters[name] for name, bytes_ in self.counters().items()}
            if self.moved:
                self.moved["copied_bytes"] = sum(self.model.sync_stats()["copied_bytes"].values())

    def counters(self) -> dict[str, int]:
        """Bytes that the engine moved so far, by their way."""
        if self.engine not in OURS:
            return {}
        counters = self.model.communicator.counters()
        return {name: counters[name] for name in ("direct_bytes", "staged_bytes", "one_shot_bytes")}

    def pair(self, round_: int, workload: Workload, batch: tuple[Tensor, Tensor], start_line: StartLine) -> None:
        """Both kinds of step on one batch, in alternating order; only the synchronized one moves the parameters."""
        for synchronize in (False, True) if round_ % 2 else (True, False):
            if self.engine == "plain" and synchronize:
                continue  # plain torch has one kind of step
            self.timed(workload, batch, synchronize, start_line)
            if synchronize or self.engine == "plain":
                self.optimizer.step()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Traces this rank, as ``syncengine.trace`` does, but makes no file of all ranks."""
    from syncengine._C import start_trace, stop_trace

    with tempfile.TemporaryDirectory() as folder:
        start_trace(f"{folder}/rank.ring", 1 << 12, "{}", 0)
        try:
            yield
        finally:
            stop_trace()


def page_faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.train_step", options.ranks, options.launcher, [*argv, "--worker"])

    rank, size = ranks.join(options.launcher)
    # With 2 ranks there is only one order of summation; with more only the ring adds in Gloo's.
    os.environ["SYNCENGINE_NUMERICS"] = "rank_order" if size == 2 else "ring"
    if {*OURS} & {*options.engines}:
        import syncengine

        syncengine.init()
    start_line = StartLine(rank, size)
    results = []
    for name in options.models:
        results.append(measure(WORKLOADS[name], rank, start_line, options))
        if rank == 0:
            print(describe(results[-1]), flush=True)
    if rank == 0:
        report(results, options)
    torch.distributed.barrier()
    if {*OURS} & {*options.engines}:
        syncengine.shutdown()
    torch.distributed.destroy_process_group()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = arguments.parser("train_step", __doc__, tuple(WORKLOADS), ENGINES)
    parser.add_argument("--launcher", choices=ranks.LAUNCHERS, default="torchrun", help="default %(default)s")
    parser.set_defaults(engines=[engine for engine in ENGINES if engine not in ON_DEMAND])
    parser.add_argument("--pairs", type=int, default=100, help="steps with and without sync; default %(default)s")
    return arguments.parse(parser, argv)


def make_trainee(engine: str, workload: Workload) -> Trainee:
    """One engine around a model that starts like all others."""
    torch.manual_seed(0)
    model = workload.build()
    if engine in OURS:
        import syncengine

        model = syncengine.Parallel(model, nonfinite="raise" if engine == "nonfinite" else None)
    elif engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "backend":
        model = DistributedDataParallel(model, process_group=backend_group())
    return Trainee(engine, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


@functools.cache
def backend_group() -> torch.distributed.ProcessGroup:
    """The process group of all ranks, on the torch.distributed backend."""
    import syncengine  # noqa: F401  registers it

    return torch.distributed.new_group(backend="syncengine")


def measure(workload: Workload, rank: int, start_line: StartLine, options: argparse.Namespace) -> dict:
    """Measures all engines on one model: milliseconds."""
    generator = torch.Generator().manual_seed(rank)
    batches = [workload.batch(generator) for _ in range(BATCHES)]
    trainees = [make_trainee(engine, workload) for engine in options.engines]
    tensors = list(trainees[0].model.parameters())
    parameters = sum(parameter.numel() for parameter in tensors)
    floor = Floor(parameters)

    for round_ in range(WARMUP_PAIRS + options.pairs):
        for turn in range(len(trainees)):  # each round begins with another engine
            trainee = trainees[(round_ + turn) % len(trainees)]
            trainee.pair(round_, workload, batches[round_ % BATCHES], start_line)
        floor.timed(start_line)

    by_engine = {trainee.engine: trainee for trainee in trainees}
    verify_equal(workload.name, by_engine)
    result = {"model": workload.name, "parameters": parameters, "tensors": len(tensors)}
    return result | {"floor_ms": stats.summary(slowest_ms(floor.seconds)), "engines": evaluate(by_engine)}


class Floor:
    """The least cost of an all-reduce of all gradients: every rank scales as many bytes in place."""

    def __init__(self, elements: int) -> None:
        self._memory = torch.ones(elements)
        self._value = 1.0
        self.seconds: list[float] = []

    def timed(self, start_line: StartLine) -> None:
        """Times one scaling, and checks it."""
        scale = 2.0 if self._value == 1 else 0.5
        start_line.wait()
        begin = time.perf_counter()
        self._memory.mul_(scale)
        self.seconds.append(time.perf_counter() - begin)
        self._value *= scale
        if not bool((self._memory == self._value).all()):
            raise AssertionError("the floor's memory is not what it was scaled to")


def slowest_ms(seconds: list[float]) -> np.ndarray:
    """Milliseconds of the slowest rank, without the warm-up."""
    return 1e3 * ranks.slowest(torch.tensor(seconds[WARMUP_PAIRS:], dtype=torch.float64)).numpy()


def evaluate(trainees: dict[str, Trainee]) -> dict[str, dict]:
    """Each engine's milliseconds: with and without sync, their difference, and what no_sync costs over plain torch."""
    no_sync = {engine: slowest_ms(trainee.no_sync) for engine, trainee in trainees.items()}
    results = {}
    for engine, trainee in trainees.items():
        entry = {"no_sync_ms": stats.summary(no_sync[engine]), "loss": trainee.loss, "moved": trainee.moved}
        entry["no_sync_faults"] = median_faults(trainee.no_sync_faults)
        if trainee.sync_faults:
            entry["sync_faults"] = median_faults(trainee.sync_faults)
        if engine in OURS:
            entry["buckets"] = trainee.model.sync_stats()["buckets"]
        if engine != "plain":
            sync = slowest_ms(trainee.sync)
            entry["sync_ms"] = stats.summary(sync)
            entry["overhead_ms"] = interval(sync - no_sync[engine])
            if "plain" in trainees:
                entry["no_sync_over_plain"] = interval(no_sync[engine] / no_sync["plain"])
                extra = 1e3 * (slowest_ms(trainee.forward) - slowest_ms(trainees["plain"].forward))
                entry["forward_overhead_us"] = interval(extra)
        results[engine] = entry
    return results


def median_faults(faults: list[float]) -> float:
    """Page faults of a step, of the rank that had most."""
    return float(np.median(ranks.slowest(torch.tensor(faults[WARMUP_PAIRS:], dtype=torch.float64)).numpy()))


def interval(samples: np.ndarray) -> dict[str, float]:
    """A median with its 95 % bootstrap interval."""
    return dict(zip(("median", "lower", "upper"), stats.median_interval(samples), strict=True))


def verify_equal(name: str, trainees: dict[str, Trainee]) -> None:
    """Raises unless syncengine and DDP trained the same bits on every rank, and so did all variants."""
    trained = [trainee for engine, trainee in trainees.items() if engine in TRAINED]
    for other in trained[1:]:
        mine, theirs = (trainee.model.module.state_dict() for trainee in (trained[0], other))
        different = [key for key in mine if not equal_bits(mine[key], theirs[key])]
        if not ranks.everywhere(not different and trained[0].loss == other.loss):
            raise AssertionError(
                f"{name}: {trained[0].engine} and {other.engine} trained different models; here loss "
                f"{trained[0].loss!r} against {other.loss!r}, and {len(different)} of {len(mine)} tensors differ: "
                f"{different[:5]}"
            )


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Equality that tells 0.0 from -0.0 and finds a NaN equal to itself."""
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def describe(result: dict) -> str:
    """One model's line while the others are still measured."""
    verified = {"syncengine", "ddp"} <= result["engines"].keys()
    return f"{result['model']}: measured" + (", trained models bit-equal" if verified else "")


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [
        (
            *("model", "M par.", "floor", "engine", "no sync", "/ plain", "sync", "overhead (95 %)", "/ floor"),
            *("of DDP's", "forward +us", "us/tensor", "page faults", "without", "MB direct", "staged", "copied"),
            "buckets",
        )
    ]
    for result in results:
        engines, floor = result["engines"], result["floor_ms"]["p50"]
        for engine, entry in engines.items():
            row = (result["model"], f"{result['parameters'] / 1e6:.1f}", f"{floor:.2f}", engine)
            row += (f"{entry['no_sync_ms']['p50']:.1f}",)
            faults = (f"{entry.get('sync_faults', 0):.0f}", f"{entry['no_sync_faults']:.0f}")
            ways = ("direct_bytes", "staged_bytes", "copied_bytes")
            faults += (*(f"{entry['moved'].get(way, 0) / 1e6:.2f}" for way in ways), str(entry.get("buckets", "")))
            if engine == "plain":
                rows.append((*row, *[""] * 7, *faults))
                continue
            ratio, cost = entry.get("no_sync_over_plain"), entry["overhead_ms"]
            ddp = engines.get("ddp", {}).get("overhead_ms")
            row += (f"{ratio['median']:.3f}" if ratio else "", f"{entry['sync_ms']['p50']:.1f}")
            row += (
                f"{cost['median']:.2f} ({cost['lower']:.2f} to {cost['upper']:.2f})",
                f"{cost['median'] / floor:.1f}",
            )
            forward = entry.get("forward_overhead_us")
            row += (f"{cost['median'] / ddp['median']:.2f}" if ddp else "",)
            row += (f"{forward['median']:.0f}" if forward else "",)
            rows.append((*row, f"{1e3 * cost['median'] / result['tensors']:.2f}", *faults))
    print(f"\nmilliseconds of a step (forward and backward), medians of {options.pairs}; {options.ranks} ranks")
    print(output.table(rows), end="\n\n")
    print("\n".join(f"{engine:<12}{MEANING[engine]}" for engine in options.engines))
    output.save(options.out, "train_step", vars(options), results)


if __name__ == "__main__":
    sys.exit(main())
