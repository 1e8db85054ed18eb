"""Trains the GPT on all ranks of the launch, and measures each step on the way."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .data import ALPHABET, Batches, load_text, validation_batches
from .engine import World, adamw, data_parallel
from .memory import resident
from .model import GPT, GPTConfig
from .progress import Progress

WARMUP_STEPS = 10  # not measured: caches, allocator and gradient buckets settle
PROBE_EVERY = 4  # every fourth step is also run without synchronization, to tell what synchronization costs
LEAST_STEPS = WARMUP_STEPS + 2 * PROBE_EVERY


@dataclass(frozen=True)
class TrainOptions:
    """The options of one training run. Two runs with equal options differ in nothing but the engine."""

    engine: str
    out: Path
    numerics: str = "rank_order"
    steps: int = 600
    batch: int = 3  # sequences per rank and step
    learning_rate: float = 1e-3
    seed: int = 1234
    layers: int = 4
    width: int = 256


class Timings:
    """Seconds of ordinary steps, and of forward + backward with and without synchronization of the same batch."""

    def __init__(self) -> None:
        self.step: list[float] = []
        self.sync: list[float] = []
        self.no_sync: list[float] = []
        self.memory = 0.0  # bytes that training has taken, at its end

    def slowest(self, world: World) -> dict[str, object]:
        """Each measurement's maximum over the ranks."""
        numbers = torch.tensor([*self.step, *self.sync, *self.no_sync, self.memory], dtype=torch.float64)
        world.maximum(numbers)
        step, sync, no_sync, memory = numbers.split([len(self.step), len(self.sync), len(self.no_sync), 1])
        return {
            "step_seconds": step.tolist(),
            "sync_seconds": sync.tolist(),
            "no_sync_seconds": no_sync.tolist(),
            "memory_bytes": memory.item(),
        }


def train(options: TrainOptions) -> None:
    """One run; rank 0 leaves `checkpoint.pt` and `metrics.json` in `options.out`."""
    torch.set_num_threads(1)  # one core per rank
    torch.manual_seed(options.seed)
    config = GPTConfig(vocabulary=len(ALPHABET), layers=options.layers, width=options.width)
    training, validation = load_text()
    before = resident()

    with data_parallel(GPT(config), options.engine, options.numerics) as (model, world):
        batches = Batches(training, options.batch, config.context, options.seed + world.rank)
        losses, timings = run_steps(model, batches, options, world, before)
        measured = timings.slowest(world)
        if world.rank == 0:
            loss = validation_loss(model.module, validation)
            metrics = {
                "engine": options.engine,
                "ranks": world.size,
                "validation_loss": loss,
                "losses": losses,
            } | measured
            save(options.out, model.module, metrics)
        world.barrier()


def run_steps(
    model: nn.Module, batches: Batches, options: TrainOptions, world: World, before: int
) -> tuple[list[float], Timings]:
    """The training loop: this rank's losses and timings. `before`: the memory before the model was made."""
    optimizer = adamw(model, options.engine, lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    losses, timings = [], Timings()

    def forward_backward(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        return loss.item()

    for step in Progress(options.steps, options.engine, losses, shown=world.rank == 0):
        inputs, targets = batches.next()
        measured = step >= WARMUP_STEPS and step % PROBE_EVERY == 0
        if measured:
            world.barrier()
            with model.no_sync():
                start = time.perf_counter()
                forward_backward(inputs, targets)  # these gradients are dropped
                timings.no_sync.append(time.perf_counter() - start)
            world.barrier()

        start = time.perf_counter()
        losses.append(forward_backward(inputs, targets))
        synchronized = time.perf_counter()
        optimizer.step()
        schedule.step()
        if measured:
            timings.sync.append(synchronized - start)
        elif step >= WARMUP_STEPS:
            timings.step.append(time.perf_counter() - start)
    world.barrier()
    timings.memory = resident() - before  # here: later the ranks no longer share what they have shared
    world.barrier()
    return losses, timings


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear rise over the first tenth, then a linear fall to 5 %."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 1 - 0.95 * (step - rise) / max(1, steps - rise)


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor) -> float:
    """The mean loss over fixed windows of text that training never saw."""
    batches = validation_batches(text, batch=32, context=model.config.context, count=8)
    return sum(model(inputs, targets).item() for inputs, targets in batches) / len(batches)


def save(out: Path, model: GPT, metrics: dict[str, object]) -> None:
    """A checkpoint of plain tensors, which any process can load, and the metrics beside it."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save({"config": asdict(model.config), "model": model.state_dict()}, out / "checkpoint.pt")
    (out / "metrics.json").write_text(json.dumps(metrics))


def load(checkpoint: Path) -> GPT:
    """The model of a checkpoint, in a plain process."""
    saved = torch.load(checkpoint, weights_only=True)
    model = GPT(GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model
