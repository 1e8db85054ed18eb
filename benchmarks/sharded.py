"""The time of a whole step, optimizer included: syncengine.ShardedOptimizer beside the plain one, and DDP with ZeRO.

python -m benchmarks.sharded                          all models, 2 ranks
python -m benchmarks.sharded --models mlp --rounds 20  one, quicker

The same model is trained by all engines in the same processes, in turns of two steps. One step is timed as a whole:
clearing the gradients, forward, backward, optimizer. In the other the ranks start together into the optimizer, which is
timed alone, with the waits of its ranks for each other. The weights must agree in every bit at the end.
"""

import argparse
import os
import random
import resource
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import arguments, output, ranks, stats
from benchmarks.support.start_line import StartLine
from benchmarks.support.workloads import LARGE, WORKLOADS, Workload

MODELS = WORKLOADS | LARGE
MEANING = {
    "today": "syncengine.Parallel, torch.optim.AdamW on each rank",
    "sharded": "syncengine.Parallel, syncengine.ShardedOptimizer",
    "ddp": "DistributedDataParallel over Gloo, torch.optim.AdamW on each rank",
    "zero": "DistributedDataParallel over Gloo, ZeroRedundancyOptimizer (parameters_as_bucket_view=True)",
}
ENGINES = tuple(MEANING)
OPTIONS = {"lr": 1e-4, "fused": True}
WARMUP_ROUNDS = 5
BATCHES = 8  # different ones, used in turn


@dataclass
class Trainee:
    """One engine's copy of the model, and this rank's seconds and page faults."""

    engine: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    step_faults: list[float] = field(default_factory=list)

    def turn(self, workload: Workload, batch: tuple[Tensor, Tensor], whole_first: bool, start_line: StartLine) -> None:
        """Two steps on one batch, timed in the two ways."""
        for whole in (whole_first, not whole_first):
            faults = page_faults()
            start_line.wait()
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            workload.loss(self.model(batch[0]), batch[1]).backward()
            if not whole:
                start_line.wait()
                begin = time.perf_counter()
            self.optimizer.step()
            (self.step if whole else self.update).append(time.perf_counter() - begin)
            if whole:
                self.step_faults.append(page_faults() - faults)


def page_faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.sharded", options.ranks, "torchrun", [*argv, "--worker"])

    import syncengine

    rank, size = ranks.join("torchrun")
    # With 2 ranks there is only one order of summation; with more only the ring adds in Gloo's.
    os.environ["SYNCENGINE_NUMERICS"] = "rank_order" if size == 2 else "ring"
    syncengine.init()
    start_line = StartLine(rank, size)
    results = []
    for name in options.models:
        results.append(measure(MODELS[name], rank, start_line, options))
        if rank == 0:
            print(f"{name}: measured, weights bit-equal", flush=True)
    if rank == 0:
        report(results, options)
    ranks.leave()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = arguments.parser("sharded", __doc__, tuple(MODELS), ENGINES)
    parser.add_argument("--rounds", type=int, default=50, help="turns of each engine; default %(default)s")
    return arguments.parse(parser, argv)


def make_trainee(engine: str, workload: Workload) -> Trainee:
    """An engine around a model that starts like all others."""
    import syncengine

    torch.manual_seed(0)
    ours = engine in ("today", "sharded")
    model = (syncengine.Parallel if ours else DistributedDataParallel)(workload.build())
    parameters, kind = model.parameters(), torch.optim.AdamW
    if engine == "sharded":
        return Trainee(engine, model, syncengine.ShardedOptimizer(parameters, kind, **OPTIONS))
    if engine == "zero":
        zero = ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=True, **OPTIONS)
        return Trainee(engine, model, zero)
    return Trainee(engine, model, kind(parameters, **OPTIONS))


def measure(workload: Workload, rank: int, start_line: StartLine, options: argparse.Namespace) -> dict:
    """Measures all engines on one model: milliseconds."""
    generator = torch.Generator().manual_seed(rank)
    batches = [workload.batch(generator) for _ in range(BATCHES)]
    trainees = [make_trainee(engine, workload) for engine in options.engines]
    tensors = list(trainees[0].model.parameters())
    for round_ in range(WARMUP_ROUNDS + options.rounds):
        for trainee in random.Random(round_).sample(trainees, len(trainees)):
            trainee.turn(workload, batches[round_ % BATCHES], bool(round_ % 2), start_line)
    verify_equal(workload.name, trainees)
    result = {"model": workload.name, "parameters": sum(p.numel() for p in tensors), "tensors": len(tensors)}
    return result | {"engines": evaluate({trainee.engine: trainee for trainee in trainees})}


def verify_equal(name: str, trainees: list[Trainee]) -> None:
    """Raises unless all engines trained the same weights and buffers, bit for bit, on every rank; and trained them."""
    torch.manual_seed(0)
    first = MODELS[name].build().state_dict()
    mine = trainees[0].model.module.state_dict()
    if all(torch.equal(first[key], mine[key]) for key in mine):
        raise AssertionError(f"{name}: nothing was trained")
    for other in trainees[1:]:
        theirs = other.model.module.state_dict()
        different = [key for key in mine if not torch.equal(bits(mine[key]), bits(theirs[key]))]
        if not ranks.everywhere(not different):
            raise AssertionError(
                f"{name}: {trainees[0].engine} and {other.engine} trained different models; "
                f"{len(different)} of {len(mine)} tensors differ here: {different[:5]}"
            )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: 0.0 is not -0.0 there, and a NaN is equal to itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


def evaluate(trainees: dict[str, Trainee]) -> dict[str, dict]:
    """Each engine's milliseconds, and the ratio of ours to theirs, turn by turn."""
    step = {name: 1e3 * slowest(trainee.step) for name, trainee in trainees.items()}
    update = {name: 1e3 * slowest(trainee.update) for name, trainee in trainees.items()}
    results = {}
    for name, trainee in trainees.items():
        entry = {"step_ms": stats.summary(step[name]), "update_ms": stats.summary(update[name])}
        entry["step_faults"] = float(np.median(slowest(trainee.step_faults)))
        if name != "sharded" and "sharded" in trainees:
            entry["step_ratio"] = interval(step["sharded"] / step[name])
            entry["update_ratio"] = interval(update["sharded"] / update[name])
            entry["step_difference_ms"] = interval(step["sharded"] - step[name])
            entry["update_difference_ms"] = interval(update["sharded"] - update[name])
        results[name] = entry
    return results


def slowest(samples: list[float]) -> np.ndarray:
    """The samples of the slowest rank, without the warm-up."""
    return ranks.slowest(torch.tensor(samples[WARMUP_ROUNDS:], dtype=torch.float64)).numpy()


def interval(samples: np.ndarray) -> dict[str, float]:
    """A median with its 95 % bootstrap interval."""
    return dict(zip(("median", "lower", "upper"), stats.median_interval(samples), strict=True))


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("model", "M par.", "engine", "step", "ours / its", "optimizer", "ours / its", "page faults")]
    for result in results:
        for name, entry in result["engines"].items():
            row = (result["model"], f"{result['parameters'] / 1e6:.1f}", name)
            row += (f"{entry['step_ms']['p50']:.2f}", ratio(entry, "step"))
            row += (f"{entry['update_ms']['p50']:.2f}", ratio(entry, "update"), f"{entry['step_faults']:.0f}")
            rows.append(row)
    print(f"\nmilliseconds, medians of {options.rounds} turns, ratios with intervals (95 %); {options.ranks} ranks")
    print(output.table(rows), end="\n\n")
    print("\n".join(f"{engine:<12}{MEANING[engine]}" for engine in options.engines))
    output.save(options.out, "sharded", vars(options), results)


def ratio(entry: dict, kind: str) -> str:
    """A ratio with its interval; empty for our own engine."""
    found = entry.get(f"{kind}_ratio")
    return f"{found['median']:.3f} ({found['lower']:.3f} to {found['upper']:.3f})" if found else ""


if __name__ == "__main__":
    sys.exit(main())
