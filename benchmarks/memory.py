"""The memory that an engine costs: growth of each rank's peak, for syncengine.Parallel and two settings of DDP.

python -m benchmarks.memory                            all models, 2 ranks
python -m benchmarks.memory --models mlp --repeats 1   one model, quicker

Growth: from before the model is wrapped to the peak while it is wrapped and trained, less what the model grows by alone
(gradients, activations, the optimizer's state). Each measurement has processes of its own, so that all find the same
heap: one in which a model was trained before keeps its gradients' pages for the next allocation. Memory is
counted as Pss, without program files: a page that ranks share counts for each in parts, so that the sum over the ranks
is what the machine gives.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import arguments, output, ranks
from benchmarks.support.pss import MIB, PeakPss, pss
from benchmarks.support.workloads import WORKLOADS, Workload

ENGINES = ("syncengine", "ddp", "ddp_view")
MEANING = {
    "plain": "the model alone; the others: what they grow by beyond that",
    "syncengine": "syncengine.Parallel",
    "ddp": "DistributedDataParallel",
    "ddp_view": "DistributedDataParallel with gradient_as_bucket_view=True",
}


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks of each measurement, reports. Rank: one measurement."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.worker:
        work(options)
        return 0

    results = []
    for model in options.models:
        growth: dict[str, list[int]] = {engine: [] for engine in ("plain", *options.engines)}
        for _ in range(options.repeats):
            for engine in growth:
                status, bytes_ = measure(model, engine, options)
                if status:
                    return status
                growth[engine].append(bytes_)
        print(f"{model}: measured", flush=True)
        parameters = sum(parameter.numel() for parameter in WORKLOADS[model].build().parameters())
        results.append({"model": model, "gradient_bytes": 4 * parameters, "growth_bytes": growth})
    report(results, options)
    return 0


def measure(model: str, engine: str, options: argparse.Namespace) -> tuple[int, int]:
    """Measures in processes of its own.

    Returns their exit status, and the growth of the rank that grew most, in bytes.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as part:
        arguments = ["--worker", "--models", model, "--engine", engine, f"--steps={options.steps}"]
        status = ranks.run_ranks("benchmarks.memory", options.ranks, "torchrun", [*arguments, "--out", part.name])
        return status, 0 if status else max(json.loads(Path(part.name).read_text()))


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = arguments.parser("memory", __doc__, tuple(WORKLOADS), ENGINES)
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="sets of processes for each engine; default %(default)s")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return arguments.parse(parser, argv)


def work(options: argparse.Namespace) -> None:
    """One engine on one model, on this rank."""
    rank, size = ranks.join("torchrun")
    wrap = wrapper(options.engine)
    dist.all_reduce(torch.ones(1))  # Gloo has its threads and buffers before the first look, whichever engine follows

    workload = WORKLOADS[options.models[0]]
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(torch.Generator().manual_seed(rank))
    dist.barrier()
    before = pss()
    with PeakPss() as peak:
        wrapped = wrap(model)
        train(wrapped, workload, batch, options.steps, peak)
        dist.barrier()  # no rank leaves pages that it shares to the others while they still look
    if options.engine != "plain":
        verify(model)

    mine = torch.tensor([peak.bytes - before], dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine)
    if rank == 0:
        options.out.write_text(json.dumps(torch.cat(every).tolist()))
    dist.barrier()
    del wrapped
    if options.engine == "syncengine":
        import syncengine

        syncengine.shutdown()
    # Gloo's threads may still hold tensors of the last calls; one that drops them while Python ends aborts the process
    # (pytorch/pytorch#179291).
    time.sleep(0.2)
    dist.destroy_process_group()


def wrapper(engine: str) -> Callable[[nn.Module], nn.Module]:
    """The function that wraps the model. Initializes the engine."""
    if engine == "syncengine":
        import syncengine

        syncengine.init()
        return syncengine.Parallel
    if engine == "plain":
        return lambda model: model
    return lambda model: DistributedDataParallel(model, gradient_as_bucket_view=engine == "ddp_view")


def train(model: nn.Module, workload: Workload, batch: tuple[Tensor, Tensor], steps: int, peak: PeakPss) -> None:
    """Makes training steps, as any script does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = batch
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        peak.look()
        optimizer.step()


def verify(model: nn.Module) -> None:
    """Raises unless all ranks ended with the same averaged gradients: otherwise nothing was synchronized."""
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    highest, lowest = gradients.clone(), gradients.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if not (torch.equal(highest, lowest) and highest.any()):
        raise AssertionError("the ranks hold different gradients after a synchronized backward")


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    shown = ["plain", *options.engines]
    rows = [("model", "gradients", *shown)]
    for result in results:
        growth = result["growth_bytes"]
        plain = median(growth["plain"])
        cells = [spread(growth["plain"], 0), *(spread(growth[engine], plain) for engine in options.engines)]
        rows.append((result["model"], f"{result['gradient_bytes'] / MIB:.1f}", *cells))
    print(
        f"\ngrowth of peak memory (Pss) of the rank that grew most, MiB, median (lowest to highest) of "
        f"{options.repeats}; {options.ranks} ranks\n{output.table(rows)}\n"
    )
    print("\n".join(f"{engine:<12}{MEANING[engine]}" for engine in shown))
    output.save(options.out, "memory", vars(options), results)


def spread(growth: list[int], plain: float) -> str:
    """Median and range of the growth beyond `plain`, in MiB."""
    low, middle, high = ((bytes_ - plain) / MIB for bytes_ in (min(growth), median(growth), max(growth)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
