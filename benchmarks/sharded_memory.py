"""The memory of a rank that trains with AdamW: by syncengine.ShardedOptimizer, by the plain one, by DDP and by ZeRO.

python -m benchmarks.sharded_memory                            2 ranks
python -m benchmarks.sharded_memory --ranks 8 --engines today sharded

The figures are the growth of Pss from before the model is built, of the rank that grew most: at its peak, and after the
last step, with gradients. One copy of weights and state a host, and a gradient a rank, is shown beside them. Each
measurement has processes of its own, as in benchmarks.memory, which says how memory is counted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.sharded import ENGINES, MEANING, MODELS, make_trainee
from benchmarks.support import arguments, output, ranks
from benchmarks.support.pss import MIB, PeakPss, pss

Growth = dict[str, list[dict[str, int]]]  # by engine, of each repetition: bytes by when


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks of each measurement, reports. Rank: one measurement."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.worker:
        work(options)
        return 0

    results = []
    for model in options.models:
        growth: Growth = {engine: [] for engine in options.engines}
        for _ in range(options.repeats):
            for engine in growth:
                with tempfile.NamedTemporaryFile(suffix=".json") as part:
                    arguments = ["--worker", "--models", model, "--engine", engine, f"--steps={options.steps}"]
                    arguments += ["--out", part.name]
                    status = ranks.run_ranks("benchmarks.sharded_memory", options.ranks, "torchrun", arguments)
                    if status:
                        return status
                    growth[engine].append(json.loads(Path(part.name).read_text()))
        print(f"{model}: measured", flush=True)
        weights = 4 * sum(parameter.numel() for parameter in MODELS[model].build().parameters())
        expected = weights + 3 * weights // options.ranks  # a gradient; weights and two moments once
        results.append({"model": model, "weight_bytes": weights, "one_copy_bytes": expected, "growth_bytes": growth})
    report(results, options)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = arguments.parser("sharded_memory", __doc__, tuple(MODELS), ENGINES)
    parser.set_defaults(models=("mlp", "mlp67", "gpt"))
    parser.add_argument("--steps", type=int, default=8, help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="sets of processes for each engine; default %(default)s")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return arguments.parse(parser, argv)


def work(options: argparse.Namespace) -> None:
    """One engine on one model, on this rank."""
    import syncengine

    rank, _ = ranks.join("torchrun")
    os.environ["SYNCENGINE_NUMERICS"] = "rank_order"
    syncengine.init()
    dist.all_reduce(torch.ones(1))  # Gloo has its threads and buffers before the first look, whichever engine follows
    workload = MODELS[options.models[0]]
    inputs, targets = workload.batch(torch.Generator().manual_seed(rank))
    load_modules()
    dist.barrier()
    before = pss()
    with PeakPss() as peak:
        trainee = make_trainee(options.engine, workload)
        for _ in range(options.steps):
            trainee.optimizer.zero_grad()
            workload.loss(trainee.model(inputs), targets).backward()
            peak.look()
            trainee.optimizer.step()
            peak.look()
        dist.barrier()
        after = pss()
        dist.barrier()  # no rank leaves pages that it shares to the others while they still look
    verify(trainee.model)

    mine = torch.tensor([peak.bytes - before, after - before], dtype=torch.int64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if rank == 0:
        options.out.write_text(json.dumps(dict(zip(("peak", "after"), mine.tolist(), strict=True))))
    dist.barrier()
    del trainee
    syncengine.shutdown()
    time.sleep(0.2)  # as in benchmarks.memory
    dist.destroy_process_group()


def load_modules() -> None:
    """Lets torch import the modules of the first optimizer, tens of MiB whatever the model, before the first look."""
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def verify(model: torch.nn.Module) -> None:
    """Raises unless all ranks ended with the same weights."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    highest, lowest = weights.clone(), weights.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if not torch.equal(highest, lowest):
        raise AssertionError("the ranks hold different weights")


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("model", "engine", "one copy", "peak", "/ today's", "after", "/ today's", "/ one copy")]
    for result in results:
        growth, expected = result["growth_bytes"], result["one_copy_bytes"]
        for engine, found in growth.items():
            row = (result["model"], engine, f"{expected / MIB:.1f}")
            for when in ("peak", "after"):
                values = [each[when] for each in found]
                low, middle, high = (bytes_ / MIB for bytes_ in (min(values), median(values), max(values)))
                row += (f"{middle:.1f} ({low:.1f} to {high:.1f})",)
                today = [each[when] for each in growth.get("today", [])]
                row += (f"{median(values) / median(today):.3f}" if today else "",)
            rows.append((*row, f"{median(values) / expected:.3f}"))
    print(
        f"\ngrowth of memory (Pss) of the rank that grew most, MiB, median (lowest to highest) of {options.repeats}; "
        f"{options.ranks} ranks\n{output.table(rows)}\n"
    )
    print("\n".join(f"{engine:<12}{MEANING[engine]}" for engine in options.engines))
    output.save(options.out, "sharded_memory", vars(options), results)


if __name__ == "__main__":
    sys.exit(main())
