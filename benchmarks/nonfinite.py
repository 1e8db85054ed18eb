"""What Parallel(nonfinite="raise") adds to the reduction of one gradient.

python -m benchmarks.nonfinite                         2 ranks, float32 and bfloat16, 64 KiB to 25 MiB
python -m benchmarks.nonfinite --steps 100             quicker

Two models of one parameter in the same ranks, one of which looks for what is not finite, take turns. A sample is the
time from backward's begin to its end on the slowest rank; backward only fills the gradient, so nearly all of it is
reduction. The averages are verified.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

import syncengine
from benchmarks.support import arguments, output, ranks, stats

WARMUP = 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20)  # bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OneParameter(nn.Module):
    """Whose gradient is its input everywhere."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=dtype))

    def forward(self, factor: float) -> Tensor:
        """A scalar."""
        return self.weight.sum() * factor


@dataclass
class Peer:
    """A model, and this rank's seconds of backward."""

    model: syncengine.Parallel
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Timed from where all ranks begin."""
        rank, size = self.model.communicator.rank, self.model.communicator.size
        loss = self.model(float(1 + rank))
        self.model.communicator.barrier()
        begin = time.perf_counter()
        loss.backward()
        self.seconds.append(time.perf_counter() - begin)
        gradient = self.model.module.weight.grad
        if gradient is None or not torch.equal(gradient, torch.full_like(gradient, (size + 1) / 2)):
            raise AssertionError(f"rank {rank}: a wrong average")
        gradient.zero_()


def measure(dtype: str, size: int, steps: int) -> dict:
    """Microseconds of the slowest rank without and with it, and what it adds, pair by pair."""
    elements = size // DTYPES[dtype].itemsize
    peers = [
        Peer(syncengine.Parallel(OneParameter(elements, DTYPES[dtype]), gradient_as_bucket_view=True, **options))
        for options in ({}, {"nonfinite": "raise"})
    ]
    for round_ in range(WARMUP + steps):
        for peer in peers if round_ % 2 else reversed(peers):
            peer.step()
    without, looking = (
        1e6 * ranks.slowest(torch.tensor(peer.seconds, dtype=torch.float64))[WARMUP:].numpy() for peer in peers
    )
    added = dict(zip(("median", "lower", "upper"), stats.median_interval(looking - without), strict=True))
    return {
        "dtype": dtype,
        "bytes": size,
        "without": stats.summary(without),
        "looking": stats.summary(looking),
        "added": added,
        "percent": {name: 100 * value / float(np.median(without)) for name, value in added.items()},
    }


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("dtype", "KiB", "us without", "us with", "us added (95 %)", "% added (95 %)")]
    for result in results:
        added, percent = result["added"], result["percent"]
        rows.append(
            (
                result["dtype"],
                str(result["bytes"] >> 10),
                f"{result['without']['p50']:.1f}",
                f"{result['looking']['p50']:.1f}",
                f"{added['median']:.1f} ({added['lower']:.1f} to {added['upper']:.1f})",
                f"{percent['median']:.1f} ({percent['lower']:.1f} to {percent['upper']:.1f})",
            )
        )
    print(f"\na backward of one gradient, medians of {options.steps}")
    print(output.table(rows))
    output.save(options.out, "nonfinite", vars(options), results)


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    parser = arguments.parser("nonfinite", __doc__, tuple(DTYPES), ())
    parser.add_argument("--steps", type=int, default=1000, help="default %(default)s")
    options = arguments.parse(parser, argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.nonfinite", options.ranks, "torchrun", [*argv, "--worker"])

    rank, _ = ranks.join("torchrun")
    syncengine.init()
    results = [measure(dtype, size, options.steps) for dtype in options.models for size in SIZES]
    if rank == 0:
        report(results, options)
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
