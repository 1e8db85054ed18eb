"""Elastic training on four ranks of which one is killed: from the kill to the beginning of the others' next step.

python -m benchmarks.elastic                 40 runs of each model
python -m benchmarks.elastic --runs 10       quicker

Each run forks its ranks and trains under syncengine.elastic with eight micro-batches a step. One rank, each in its
turn, is killed by SIGKILL at a random instant of a step. The slowest of the others is timed: until it
notices, and until it begins its next step, which is the same one again, or the one after if some rank had finished it.
All must end with the weights that one rank alone comes to.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch._dynamo  # torch.optim imports it, for seconds: else each rank would
from torch.utils.data import DataLoader

import syncengine
from benchmarks.micro_batches import Batches, only
from benchmarks.support import arguments, output, stats
from benchmarks.support.workloads import WORKLOADS, Workload
from examples.same_bits import digest

STEPS, TOTAL = 8, 8  # of a run, and micro-batches of a step
FIRST, LAST = 2, 5  # the steps in which a rank is killed
PATIENCE = 300.0  # seconds that a run may take
EDGES = (25, 50, 100, 150, 200, 300, 500, 1000)  # of the histogram, ms

fork = multiprocessing.get_context("fork")  # torch is imported once


def train(workload: Workload, begun: Sequence[int]) -> tuple[str, list[float], list[float]]:
    """Trains on one rank. Returns the digest of its weights, and when it noticed deaths and began the next steps."""
    torch.manual_seed(0)
    net = workload.build()
    rank = syncengine.init(timeout=PATIENCE, summary=False).rank
    model = syncengine.Parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    loader = DataLoader(Batches(workload), batch_size=1, collate_fn=only)
    noticed: list[float] = []
    resumed: list[float] = []

    def steps(elastic: syncengine.Elastic) -> None:
        batches = syncengine.micro_batches(model, loader, total=TOTAL)
        batches.step = elastic.step
        try:
            for step in elastic.steps(STEPS):
                if len(resumed) < len(noticed):
                    resumed.append(time.monotonic())
                begun[rank] = step
                for _, (inputs, targets) in batches:
                    workload.loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        except syncengine.errors.SyncError:
            noticed.append(time.monotonic())
            raise

    syncengine.elastic(steps, model=model, optimizer=optimizer)
    syncengine.shutdown()
    return digest(net), noticed, resumed


class Run:
    """The ranks of one run."""

    def __init__(self, workload: Workload, ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self.begun = fork.RawArray("q", [-1] * ranks)  # of each rank the step
        self._answers: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            environ = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(fork.Process(target=self._train, args=(workload, environ, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._answers.append(ours)

    def _train(self, workload: Workload, environ: dict[str, str], answer: Connection) -> None:
        os.environ |= environ
        answer.send(train(workload, self.begun))

    def kill(self, rank: int, step: int, part: float) -> float:
        """Kills a rank when it has made that part of a step, judged by the time of the step before. Returns when."""
        before = self._begins(rank, step - 1)
        time.sleep(part * (self._begins(rank, step) - before))
        killed = time.monotonic()
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        return killed

    def _begins(self, rank: int, step: int) -> float:
        """Waits until a rank begins a step; returns when."""
        deadline = time.monotonic() + PATIENCE
        while self.begun[rank] < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has not begun step {step}: it is in step {self.begun[rank]}")
            time.sleep(1e-3)
        return time.monotonic()

    def answers(self, without: int | None = None) -> list[tuple[str, list[float], list[float]]]:
        """The values that `train` returns on all ranks but one."""
        try:
            told = []
            for rank, answer in enumerate(self._answers):
                if rank != without:
                    if not answer.poll(PATIENCE):
                        raise TimeoutError(f"rank {rank} has not ended within {PATIENCE} s")
                    told.append(answer.recv())
            return told
        finally:
            for process in self._processes:
                process.kill()
                process.join()


def measure(workload: Workload, ranks: int, runs: int) -> dict:
    """Milliseconds of the slowest rank from the kill until it notices, and until its next step begins."""
    draw = random.Random(0)
    ((expected, _, _),) = Run(workload, 1).answers()
    took: dict[str, list[float]] = {"noticed": [], "next step": []}
    for number in range(runs):
        victim = number % ranks
        run = Run(workload, ranks)
        killed = run.kill(victim, draw.randint(FIRST, LAST), draw.random())
        told = run.answers(without=victim)
        for weights, noticed, resumed in told:
            if weights != expected:
                raise AssertionError(
                    f"{workload.name}: with rank {victim} killed the others have trained another model"
                )
            if not len(noticed) == len(resumed) == 1:
                raise AssertionError(f"{workload.name}: ranks noticed {len(noticed)} deaths, and began anew {resumed}")
        took["noticed"].append(1e3 * (max(noticed[0] for _, noticed, _ in told) - killed))
        took["next step"].append(1e3 * (max(resumed[0] for _, _, resumed in told) - killed))
        print(f"\r{workload.name}: {number + 1} of {runs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found = {name: stats.summary(one) | {"p95": float(torch.tensor(one).quantile(0.95))} for name, one in took.items()}
    parameters = sum(p.numel() for p in workload.build().parameters())
    return {"model": workload.name, "parameters": parameters, "ms": found, "histogram": histogram(took["next step"])}


def histogram(samples: Sequence[float]) -> dict[str, int]:
    """Counts of samples between each edge and the one before; the last count is of samples above all edges."""
    counts = {f"< {edge}": 0 for edge in EDGES} | {f">= {EDGES[-1]}": 0}
    for sample in samples:
        counts[next((f"< {edge}" for edge in EDGES if sample < edge), f">= {EDGES[-1]}")] += 1
    return counts


def report(results: list[dict], options: argparse.Namespace) -> None:
    """Tables on the terminal, and the result file."""
    rows = [("model", "after the kill", "median, ms", "95 %", "max")]
    for result in results:
        for name, ms in result["ms"].items():
            rows.append((result["model"], name, *(f"{ms[p]:.0f}" for p in ("p50", "p95", "p100"))))
    print(f"\n{options.ranks} ranks of which one is killed: the slowest of the others, {options.runs} runs")
    print(output.table(rows))
    for result in results:
        print(f"\n{result['model']}: ms from the kill to the next step")
        for bin_, count in result["histogram"].items():
            print(f"{bin_:>8} {count:4} {'#' * count}".rstrip())
    output.save(options.out, "elastic", vars(options), results)


def main(argv: list[str] | None = None) -> int:
    """Forks the ranks; reports."""
    parser = arguments.parser("elastic", __doc__, tuple(WORKLOADS), ())
    parser.set_defaults(ranks=4, models=("gpt", "mlp"))
    parser.add_argument("--runs", type=int, default=40, help="default %(default)s")
    options = arguments.parse(parser, sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    report([measure(WORKLOADS[name], options.ranks, options.runs) for name in options.models], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
