"""torchmetrics and pytorch-ignite ask torch.distributed for the ranks: what they say is what they say under DDP."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncengine

torchmetrics = pytest.importorskip("torchmetrics")
ignite = pytest.importorskip("ignite")

import ignite.distributed as idist  # noqa: E402
from ignite.engine import Engine, Events, create_supervised_evaluator  # noqa: E402
from ignite.metrics import Accuracy, Loss, RunningAverage  # noqa: E402

WAYS = ("DDP over Gloo", 'init_process_group("syncengine")', "init(torch_group=True)")


def begin(way: str) -> Callable[[nn.Module], nn.Module]:
    """Makes the ranks known to torch.distributed; returns what wraps a model."""
    if way == "init(torch_group=True)":
        syncengine.init(torch_group=True)
        return syncengine.Parallel
    store = dist.PrefixStore(way, dist.FileStore(os.environ["STORE"]))
    backend = "gloo" if way == "DDP over Gloo" else "syncengine"
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=2)
    return DistributedDataParallel if backend == "gloo" else syncengine.Parallel


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 12, generator=generator), torch.randint(3, (count,), generator=generator))


def with_torchmetrics(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(3),
            "confusion": torchmetrics.classification.MulticlassConfusionMatrix(3),
            # It gathers the samples, of other number on each rank.
            "auroc": torchmetrics.classification.MulticlassAUROC(3),
        }
    )
    loss_of_epoch = torchmetrics.MeanMetric()
    in_each_step = torchmetrics.classification.MulticlassAccuracy(3, dist_sync_on_step=True)
    steps = []
    for x, y in DataLoader(samples(20 + 3 * dist.get_rank(), dist.get_rank()), batch_size=6, drop_last=True):
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(output.softmax(1), y)
        loss_of_epoch.update(loss.detach())
        steps.append(in_each_step(output, y))
    more = samples(5 + 4 * dist.get_rank(), 7)[:]
    metrics.update(model(more[0]).detach().softmax(1), more[1])
    return {**metrics.compute(), "loss": loss_of_epoch.compute(), "steps": torch.stack(steps)}


def with_ignite(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    assert (idist.get_rank(), idist.get_world_size()) == (dist.get_rank(), 2)
    assert idist.backend() == dist.get_backend()
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running loss")
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(nn.functional.cross_entropy)})
    data = samples(24, 1)
    sampler = DistributedSampler(data)
    results: dict[str, Any] = {}

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        evaluator.run(DataLoader(samples(10 + dist.get_rank(), 2), batch_size=4))
        results.update({f"{name} {engine.state.epoch}": value for name, value in evaluator.state.metrics.items()})

    trainer.run(DataLoader(data, batch_size=4, sampler=sampler), max_epochs=2)
    gathered = idist.all_gather(torch.tensor([float(idist.get_rank())]))
    total = idist.all_reduce(torch.tensor([idist.get_rank() + 1.0]))
    return {**results, "running": trainer.state.metrics["running loss"], "ranks": gathered, "total": total}


def compare(script: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    answers = []
    for way in WAYS:
        answers.append(script(begin(way)))
        idist.finalize() if script is with_ignite else None
        if dist.is_initialized():
            dist.destroy_process_group()
        syncengine.shutdown()
    return answers


@pytest.mark.parametrize("script", [with_torchmetrics, with_ignite])
def test_metrics_are_those_of_ddp(pool: RankPool, tmp_path: Any, script: Callable[..., dict[str, Any]]):
    environ = {"STORE": str(tmp_path / "store")}
    with pool.spawn_ranks(compare, script, settings=None, environ=environ) as ranks:
        for theirs, *ours in [rank.result(180) for rank in ranks]:
            assert theirs
            for answers in ours:
                assert list(answers) == list(theirs)
                for name, value in theirs.items():
                    assert torch.equal(torch.as_tensor(answers[name]), torch.as_tensor(value)), name
