"""The time that Parallel(nonfinite="raise") and a trace add to the reduction of one gradient, which is one bucket.

python -m benchmarks.looking                           2 ranks, float32 and bfloat16, 64 KiB to 25 MiB
python -m benchmarks.looking --steps 100               quicker

Models of one parameter in the same ranks: one without anything and one that looks for NaN and Inf take turns
step by step; one that is traced and one that is not, in turns of 50 steps, whose medians are compared. A sample is the
time from backward's begin to its end on the slowest rank; backward only fills the gradient, so nearly all of it is
reduction. The averages are verified.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

import syncengine
from benchmarks.support import arguments, output, ranks, stats
from benchmarks.train_step import recorded

TURN = 50  # steps
WARMUP = 50
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20)  # bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OneParameter(nn.Module):
    """A model of one parameter, whose gradient is the input everywhere."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=dtype))

    def forward(self, factor: float) -> Tensor:
        """The loss: a scalar."""
        return self.weight.sum() * factor


@dataclass
class Peer:
    """A model, and this rank's seconds of backward."""

    model: syncengine.Parallel
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Times one backward, from a barrier on."""
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
    """Microseconds of the slowest rank without anything, and what each kind of looking adds, step by step."""

    def peer(**options: str) -> Peer:
        module = OneParameter(size // DTYPES[dtype].itemsize, DTYPES[dtype])
        return Peer(syncengine.Parallel(module, gradient_as_bucket_view=True, **options))

    without, nonfinite, untraced, traced = peer(), peer(nonfinite="raise"), peer(), peer()
    for step in range(WARMUP + steps):
        for one in (without, nonfinite) if step % 2 else (nonfinite, without):
            one.step()
    for turn in range((WARMUP + steps) // TURN):
        for one in (untraced, traced) if turn % 2 else (traced, untraced):
            with recorded() if one is traced else contextlib.nullcontext():
                for _ in range(TURN):
                    one.step()

    def times(one: Peer) -> np.ndarray:
        return 1e6 * ranks.slowest(torch.tensor(one.seconds, dtype=torch.float64))[WARMUP:].numpy()

    def compared(plain: np.ndarray, looking: np.ndarray) -> dict:
        added = dict(zip(("median", "lower", "upper"), stats.median_interval(looking - plain), strict=True))
        percent = {bound: 100 * value / float(np.median(plain)) for bound, value in added.items()}
        return {"without": stats.summary(plain), "with": stats.summary(looking), "added": added, "percent": percent}

    turns = (np.median(times(one).reshape(-1, TURN), axis=1) for one in (untraced, traced))
    return {
        "dtype": dtype,
        "bytes": size,
        "nonfinite": compared(times(without), times(nonfinite)),
        "traced": compared(*turns),
    }


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("dtype", "KiB", "", "us without", "us with", "us added (95 %)", "% added (95 %)")]
    for result in results:
        for name in ("nonfinite", "traced"):
            looking = result[name]
            medians = (f"{looking[which]['p50']:.1f}" for which in ("without", "with"))
            between = ("{median:.1f} ({lower:.1f} to {upper:.1f})".format(**looking[of]) for of in ("added", "percent"))
            rows.append((result["dtype"], str(result["bytes"] >> 10), name, *medians, *between))
    print(f"\na backward of one gradient, medians of {options.steps}")
    print(output.table(rows))
    output.save(options.out, "looking", vars(options), results)


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    parser = arguments.parser("looking", __doc__, tuple(DTYPES), ())
    parser.add_argument("--steps", type=int, default=1000, help="default %(default)s")
    options = arguments.parse(parser, argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.looking", options.ranks, "torchrun", [*argv, "--worker"])

    rank, _ = ranks.join("torchrun")
    syncengine.init()
    results = [measure(dtype, size, options.steps) for dtype in options.models for size in SIZES]
    if rank == 0:
        report(results, options)
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
