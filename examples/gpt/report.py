"""The table and the plot that end a comparison."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .model import GPT

NAMES = {"syncengine": "syncengine", "ddp": "DDP + Gloo", "sharded": "ShardedOptimizer"}
COMPUTE, EXPOSED = "#7f8c99", "#d1495b"
LINE = {
    "syncengine": {"color": "#00798c", "linewidth": 3},
    "ddp": {"color": "black", "linewidth": 1, "linestyle": "--"},
    "sharded": {"color": "#edae49", "linewidth": 1, "linestyle": ":"},
}


@dataclass(frozen=True)
class Run:
    """One engine's trained model and what was measured while it trained."""

    engine: str
    model: GPT
    metrics: dict

    @property
    def training_loss(self) -> float:
        """Rank 0's mean over the last steps: single batches are noisy."""
        last = self.metrics["losses"][-20:]
        return sum(last) / len(last)

    @property
    def step_ms(self) -> float:
        """The milliseconds of an ordinary step on the slowest rank: the median."""
        return 1e3 * median(self.metrics["step_seconds"])

    @property
    def overhead_ms(self) -> float:
        """Milliseconds that synchronization adds to forward and backward: the median over pairs of the same batch."""
        pairs = zip(self.metrics["sync_seconds"], self.metrics["no_sync_seconds"], strict=True)
        return 1e3 * median(sync - no_sync for sync, no_sync in pairs)


def table(runs: list[Run], differences: list[tuple[int, float]]) -> str:
    """The comparison in plain text. `differences`: elements of each run's model unlike the first's, and the largest."""
    ranks = runs[0].metrics["ranks"]
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    rows = [
        ("", *(NAMES[run.engine] for run in runs)),
        ("training loss, last steps", *(f"{run.training_loss:.6f}" for run in runs)),
        ("validation loss", *(f"{run.metrics['validation_loss']:.6f}" for run in runs)),
        ("median step time", *(f"{run.step_ms:.1f} ms" for run in runs)),
        ("sync overhead per step", *(f"{run.overhead_ms:.1f} ms" for run in runs)),
        ("memory per rank", *(f"{run.metrics['memory_bytes'] / 2**20:.0f} MiB" for run in runs)),
    ]
    lines = [f"\nGPT of {parameters / 1e6:.1f} M parameters, {ranks} ranks, {len(runs[0].metrics['losses'])} steps\n"]
    lines += [f"{label:<28}" + "".join(f"{cell:>18}" for cell in cells) for label, *cells in rows]
    different, largest = (max(values) for values in zip(*differences, strict=True))
    lines.append(
        f"\nlargest difference between the trained models: {largest:g} ({different} elements differ in any bit)"
    )
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """Loss curves of all runs, and each step's time split into compute and exposed synchronization."""
    from matplotlib.figure import Figure  # ranks, which import this file, too, draw nothing

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for run in runs:
        losses = run.metrics["losses"]
        smooth = [sum(window) / len(window) for window in (losses[max(0, i - 19) : i + 1] for i in range(len(losses)))]
        curves.plot(range(1, len(losses) + 1), smooth, label=NAMES[run.engine], **LINE[run.engine])
    curves.set(title="Training loss (rank 0, mean of 20 steps)", xlabel="step", ylabel="nats per character")
    curves.legend(frameon=False)

    names = [NAMES[run.engine] for run in runs]
    exposed = [max(0.0, run.overhead_ms) for run in runs]
    compute = [run.step_ms - overhead for run, overhead in zip(runs, exposed, strict=True)]
    bars.barh(names, compute, height=0.5, color=COMPUTE, label="compute")
    bars.barh(names, exposed, height=0.5, left=compute, color=EXPOSED, label="exposed synchronization")
    for row, run in enumerate(runs):
        bars.text(run.step_ms, row, f" {run.step_ms:.1f} ms, sync {run.overhead_ms:.1f} ms", va="center")
    bars.invert_yaxis()
    bars.set(title="Median step time", xlabel="ms", xlim=(0, 1.75 * max(run.step_ms for run in runs)))
    bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
