"""The time of a whole step by FSDP2's replicate and fully_shard, over Gloo and over the engine, beside Parallel's.

python -m benchmarks.replicate                            both models, 2 ranks
python -m benchmarks.replicate --models mlp --rounds 20    one, quicker

The same model is trained by all engines in the same processes, one step each in turns, optimizer included. The weights
must agree in every bit at the end, but for those of plain torch, which averages nothing.
"""

import argparse
import functools
import random
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import syncengine
from benchmarks.sharded import BATCHES, WARMUP_ROUNDS, interval, slowest
from benchmarks.support import arguments, output, ranks, stats
from benchmarks.support.start_line import StartLine
from benchmarks.support.workloads import WORKLOADS, Workload

MEANING = {
    "plain": "torch without any wrapper",
    "parallel": "syncengine.Parallel",
    "ddp": "DistributedDataParallel over Gloo",
    "replicate": "replicate over the torch.distributed backend syncengine",
    "replicate_gloo": "replicate over Gloo",
    "fsdp": "fully_shard over the torch.distributed backend syncengine",
    "fsdp_gloo": "fully_shard over Gloo",
}
ENGINES = tuple(MEANING)


@dataclass
class Trainee:
    """One engine's copy of the model, and this rank's seconds."""

    engine: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: list[float] = field(default_factory=list)

    def turn(self, workload: Workload, batch: tuple[Tensor, Tensor], start_line: StartLine) -> None:
        """One step."""
        start_line.wait()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        workload.loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        self.step.append(time.perf_counter() - begin)

    def weights(self) -> list[Tensor]:
        """The whole parameters, on every rank. All ranks call it."""
        parameters = [p.detach() for p in self.model.parameters()]
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    parser = arguments.parser("replicate", __doc__, ("mlp", "gpt"), ENGINES)
    parser.add_argument("--rounds", type=int, default=50, help="steps of each engine; default %(default)s")
    options = arguments.parse(parser, argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.replicate", options.ranks, "torchrun", [*argv, "--worker"])

    rank, size = ranks.join("torchrun")
    syncengine.init()
    start_line = StartLine(rank, size)
    results = [measure(WORKLOADS[name], rank, start_line, options) for name in options.models]
    if rank == 0:
        report(results, options)
    ranks.leave()
    return 0


@functools.cache
def mesh(backend: str) -> DeviceMesh:
    """All ranks, over a process group of their own."""
    return DeviceMesh.from_group(torch.distributed.new_group(backend=backend), "cpu")


def make_trainee(engine: str, workload: Workload) -> Trainee:
    """An engine around a model that starts like all others."""
    torch.manual_seed(0)
    model = workload.build()
    if engine == "parallel":
        model = syncengine.Parallel(model)
    elif engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine != "plain":
        (replicate if engine.startswith("replicate") else fully_shard)(
            model, mesh=mesh("gloo" if engine.endswith("gloo") else "syncengine")
        )
    return Trainee(engine, model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def measure(workload: Workload, rank: int, start_line: StartLine, options: argparse.Namespace) -> dict:
    """Measures all engines on one model: milliseconds."""
    generator = torch.Generator().manual_seed(rank)
    batches = [workload.batch(generator) for _ in range(BATCHES)]
    trainees = [make_trainee(engine, workload) for engine in options.engines]
    before = [weight.clone() for weight in trainees[0].weights()]
    for round_ in range(WARMUP_ROUNDS + options.rounds):
        for trainee in random.Random(round_).sample(trainees, len(trainees)):
            trainee.turn(workload, batches[round_ % BATCHES], start_line)
    verify_equal(workload.name, before, [trainee for trainee in trainees if trainee.engine != "plain"])
    result = {"model": workload.name, "parameters": sum(weight.numel() for weight in before)}
    return result | {"engines": evaluate({trainee.engine: trainee for trainee in trainees})}


def verify_equal(name: str, before: list[Tensor], trainees: list[Trainee]) -> None:
    """Raises unless the engines trained the same weights, bit for bit, on every rank; and trained them."""
    first = trainees[0].weights()
    if all(map(torch.equal, before, first)):
        raise AssertionError(f"{name}: nothing was trained")
    for other in trainees[1:]:
        different = sum(not torch.equal(a, b) for a, b in zip(first, other.weights(), strict=True))
        if not ranks.everywhere(not different):
            raise AssertionError(
                f"{name}: {trainees[0].engine} and {other.engine} trained different models; "
                f"{different} of {len(first)} parameters differ here"
            )


def evaluate(trainees: dict[str, Trainee]) -> dict[str, dict]:
    """Each engine's milliseconds, and the ratio of its step to Parallel's, turn by turn."""
    step = {name: 1e3 * slowest(trainee.step) for name, trainee in trainees.items()}
    results = {name: {"step_ms": stats.summary(ms)} for name, ms in step.items()}
    for name in set(step) - {"parallel"} if "parallel" in step else ():
        results[name]["of_parallel"] = interval(step[name] / step["parallel"])
    return results


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("model", "engine", "step", "of Parallel's (95 %)")]
    for result in results:
        for name, entry in result["engines"].items():
            found = entry.get("of_parallel")
            text = f"{found['median']:.3f} ({found['lower']:.3f} to {found['upper']:.3f})" if found else ""
            rows.append((result["model"], name, f"{entry['step_ms']['p50']:.1f}", text))
    print(f"milliseconds of a step with AdamW, medians of {options.rounds}; {options.ranks} ranks; weights bit-equal")
    print(output.table(rows), end="\n\n")
    print("\n".join(f"{engine:<16}{MEANING[engine]}" for engine in options.engines))
    output.save(options.out, "replicate", vars(options), results)


if __name__ == "__main__":
    sys.exit(main())
