"""Runs the training with syncengine, with torch's DistributedDataParallel over Gloo, and sharded, and compares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from syncengine.report import write_report

from .engine import ENGINES
from .report import Run, plot, table
from .train import load

REPOSITORY = Path(__file__).parents[2]


def compare(ranks: int, out: Path, arguments: list[str]) -> bool:
    """Whether all engines trained the same bits; prints the table and leaves `comparison.png` in `out`."""
    runs = []
    for engine in ENGINES:
        launch(ranks, engine, out / engine, arguments, trace=out / "trace" if engine == "syncengine" else None)
        runs.append(
            Run(engine, load(out / engine / "checkpoint.pt"), json.loads((out / engine / "metrics.json").read_text()))
        )
    differences = [difference(run.model, runs[0].model) for run in runs]
    print(table(runs, differences))
    plot(runs, out / "comparison.png")
    verdict, page = write_report(out / "trace")
    print(f"\nplot        {out / 'comparison.png'}\ncheckpoint  {out / 'syncengine' / 'checkpoint.pt'}")
    print(f"verdict     {verdict}\nreport      {page}")
    return not any(different for different, _ in differences)


def launch(ranks: int, engine: str, out: Path, arguments: list[str], trace: Path | None = None) -> None:
    """One training run under torchrun. ``trace``: where its ranks record what they do."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    train = ["-m", "examples.train_gpt", "train", f"--engine={engine}", f"--out={out}", *arguments]
    # One thread per rank; set here, or torchrun warns that it does so itself.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if trace is not None:
        environment["SYNCENGINE_TRACE"] = str(trace.absolute())
    finished = subprocess.run(torchrun + train, check=False, cwd=REPOSITORY, env=environment)
    if finished.returncode:
        sys.exit(f"the {engine} run failed with exit status {finished.returncode}: see its output above")


@torch.no_grad()
def difference(one: torch.nn.Module, other: torch.nn.Module) -> tuple[int, float]:
    """(number of parameter elements that differ in any bit, largest absolute difference)."""
    different, largest = 0, 0.0
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        different += int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
        largest = max(largest, float((mine - theirs).abs().max()))
    return different, largest
