"""Steps of numbered micro-batches, which have the same bits at any number of ranks, beside what they cost.

python -m benchmarks.micro_batches                     M = ranks beside rank_order, then M = 8 on 1, 2, 3 and 4 ranks
python -m benchmarks.micro_batches --steps 20          quicker

All trainees run in the same processes, in turns. First each rank computes one micro-batch a step, by micro_batches()
and by Parallel alone, which adds in the order of ranks. Then the first 1, 2, 3 and 4 ranks train with eight
micro-batches a step, while the others sleep. `3 (3, 3, 2)` is the cost of another deal, with nearly as many
micro-batches on each rank and two synchronized backwards a step; it has not the bits of the tree. `elsewhere` is a
model whose micro-batches take 10 ms without a processor, as if each rank had one for itself. `buffers_1` and
`buffers_16` have as many MiB of buffers, of which each forward writes all. Trainees that trained the same must agree in
every bit.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import syncengine
from benchmarks.support import arguments, output, ranks, stats
from benchmarks.support.workloads import WORKLOADS, Workload

WARMUP = 4
TOTAL = 8
BATCHES = 16  # different ones, of whole micro-batches
BALANCED = "3 (3, 3, 2)"


class Elsewhere(nn.Module):
    """Ten layers of width 256, and 10 ms that take no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps inputs [batch, 256] to outputs of that shape."""
        time.sleep(10e-3)
        return self.layers(inputs)


class Writes(nn.Module):
    """Ten layers of width 256, and sixteen buffers of ``mib`` MiB together that each forward writes."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(10)))
        for i in range(16):
            self.register_buffer(f"written_{i}", torch.ones(mib << 14))

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, 256], as its inputs."""
        for buffer in self.buffers():
            buffer.add_(1)
        return self.layers(inputs)


def few(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight random inputs and targets."""
    return torch.randn(8, 256, generator=generator), torch.randn(8, 256, generator=generator)


MODELS = {
    "mlp": WORKLOADS["mlp"],
    "gpt": WORKLOADS["gpt"],
    "elsewhere": Workload("elsewhere", Elsewhere, nn.functional.mse_loss, few),
    "buffers_1": Workload("buffers_1", lambda: Writes(1), nn.functional.mse_loss, few),
    "buffers_16": Workload("buffers_16", lambda: Writes(16), nn.functional.mse_loss, few),
}


class Batches(Dataset):
    """A data set whose samples are whole micro-batches."""

    def __init__(self, workload: Workload) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [workload.batch(generator) for _ in range(BATCHES)]

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._batches[index]


def only(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sample of a batch of one."""
    return batches[0]


@dataclass
class Trainee:
    """A copy of the model, how a step computes its gradients, and this rank's seconds."""

    model: syncengine.Parallel
    optimizer: torch.optim.Optimizer
    gradients: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Forwards and backwards are timed; the optimizer is left out: it is the same for all."""
        self.model.communicator.barrier()
        begin = time.perf_counter()
        self.gradients()
        self.seconds.append(time.perf_counter() - begin)
        self.optimizer.step()
        self.optimizer.zero_grad()


def numbered(workload: Workload, communicator: syncengine.Communicator, total: int) -> Trainee:
    """A trainee that steps by micro_batches()."""
    model, optimizer, loader = parts(workload, communicator)
    batches = syncengine.micro_batches(model, loader, total=total)

    def gradients() -> None:
        for _, (inputs, targets) in batches:
            workload.loss(model(inputs), targets).backward()

    return Trainee(model, optimizer, gradients)


def in_rank_order(workload: Workload, communicator: syncengine.Communicator, deal: list[int]) -> Trainee:
    """A trainee that steps by Parallel alone.

    Each rank computes as many micro-batches as it is dealt, and synchronizes as many as every rank has.
    """
    model, optimizer, loader = parts(workload, communicator)
    mine, synchronized = deal[communicator.rank], min(deal)
    first = sum(deal[: communicator.rank])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:  # the micro-batches that micro_batches() deals to these ranks, in its order
            order = list(loader)
            for step in range(BATCHES // sum(deal)):
                yield from order[step * sum(deal) + first :][:mine]

    following = batches()

    def gradients() -> None:
        for i in range(mine):
            inputs, targets = next(following)
            model.require_backward_grad_sync = mine - i <= synchronized
            workload.loss(model(inputs), targets).backward()

    return Trainee(model, optimizer, gradients)


def parts(
    workload: Workload, communicator: syncengine.Communicator
) -> tuple[syncengine.Parallel, torch.optim.Optimizer, DataLoader]:
    """A model that starts like all others, with its optimizer and loader."""
    torch.manual_seed(0)
    net = workload.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(Batches(workload), batch_size=1, collate_fn=only)
    return syncengine.Parallel(net, process_group=communicator), optimizer, loader


def measure(trainees: dict[str, Trainee | None], steps: int) -> dict[str, np.ndarray]:
    """Milliseconds of the slowest rank, by trainee. A trainee is None on ranks that have no part in it."""
    names = list(trainees)
    for round_ in range(WARMUP + steps):
        for turn in range(len(names)):  # each round begins with another
            torch.distributed.barrier()  # who has no part sleeps there
            if trainee := trainees[names[(round_ + turn) % len(names)]]:
                trainee.step()
    took = {}
    for name, trainee in trainees.items():
        mine = torch.tensor(trainee.seconds if trainee else [0.0] * (WARMUP + steps), dtype=torch.float64)
        took[name] = 1e3 * ranks.slowest(mine)[WARMUP:].numpy()
    return took


def verify_equal(trainees: dict[str, Trainee | None]) -> None:
    """Raises unless all have trained the same bits, on every rank that has trained."""
    own = {name: [p.detach() for p in t.model.module.parameters()] for name, t in trainees.items() if t}
    names = list(own)
    for name in names[1:]:
        if not all(torch.equal(a, b) for a, b in zip(own[names[0]], own[name], strict=True)):
            raise AssertionError(f"{names[0]} and {name} have trained different models")


def ratio(took: np.ndarray, beside: np.ndarray) -> dict[str, float]:
    """The median ratio of two steps of one round, and its 95 % bootstrap interval."""
    return dict(zip(("median", "lower", "upper"), stats.median_interval(took / beside), strict=True))


def measure_all(
    workload: Workload, groups: dict[int, syncengine.Communicator], rank: int, options: argparse.Namespace
) -> list[dict]:
    """Both comparisons of one model, each on the first ranks of its size."""
    results = []
    for size in (2, max(groups)):
        pair: dict[str, Trainee | None] = {"rank_order": None, "micro_batches": None}
        if rank < size:
            pair = {
                "rank_order": in_rank_order(workload, groups[size], [1] * size),
                "micro_batches": numbered(workload, groups[size], size),
            }
        took = measure(pair, options.steps)
        if size == 2:
            verify_equal(pair)  # there is one sum of two
        results.append({"model": workload.name, "comparison": f"one micro-batch a rank, {size} ranks"} | summary(took))
    trainees: dict[str, Trainee | None] = {
        str(size): numbered(workload, group, TOTAL) if rank < size else None for size, group in groups.items()
    }
    trained = dict(trainees)
    if 3 in groups:
        trainees[BALANCED] = in_rank_order(workload, groups[3], [3, 3, 2]) if rank < 3 else None
    took = measure(trainees, options.steps)
    verify_equal(trained)
    return [*results, {"model": workload.name, "comparison": f"{TOTAL} micro-batches, by ranks"} | summary(took)]


def summary(took: dict[str, np.ndarray]) -> dict[str, dict]:
    """Each trainee's milliseconds, and their ratio to those of the first trainee in the same round."""
    first = next(iter(took.values()))
    return {
        "ms": {name: stats.summary(one) for name, one in took.items()},
        "ratio": {name: ratio(one, first) for name, one in took.items()},
    }


def report(results: list[dict], options: argparse.Namespace) -> None:
    """One table on the terminal, and the result file."""
    rows = [("model", "comparison", "trained", "ms", "10 %", "90 %", "/ first (95 %)")]
    for result in results:
        for name, ms in result["ms"].items():
            part = result["ratio"][name]
            spread = f"{part['median']:.3f} ({part['lower']:.3f} to {part['upper']:.3f})"
            rows.append(
                (result["model"], result["comparison"], name, *(f"{ms[p]:.2f}" for p in ("p50", "p10", "p90")), spread)
            )
    print(f"\nmilliseconds of a step (forwards and backwards), medians of {options.steps}")
    print(output.table(rows))
    output.save(options.out, "micro_batches", vars(options), results)


def main(argv: list[str] | None = None) -> int:
    """Parent: starts the ranks. Rank: measures; rank 0 reports."""
    argv = sys.argv[1:] if argv is None else argv
    parser = arguments.parser("micro_batches", __doc__, tuple(MODELS), ())
    parser.set_defaults(ranks=4)
    parser.add_argument("--steps", type=int, default=60, help="default %(default)s")
    options = arguments.parse(parser, argv)
    if not options.worker:
        return ranks.run_ranks("benchmarks.micro_batches", options.ranks, "torchrun", [*argv, "--worker"])

    rank, size = ranks.join("torchrun")
    everybody = syncengine.init()
    groups = {n: everybody.split(range(n) if rank < n else []) for n in range(1, size)} | {size: everybody}
    results = [result for name in options.models for result in measure_all(MODELS[name], groups, rank, options)]
    if rank == 0:
        report(results, options)
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
