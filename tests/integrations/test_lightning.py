"""`Trainer(strategy=syncengine.lightning.Strategy())`: what mainstream training does, bit for bit as over DDP."""

import csv
import functools
import os
from pathlib import Path
from typing import Any

import lightning_ranks
import pytest
import torch
import torch.distributed as dist
from commands import ROOT, load, over_gloo, torchrun
from lightning_ranks import QUIET, both, leave, loader, module, on_ranks, same, shared_folder, validate, weights
from test_summary import KEYS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

import syncengine
from syncengine import _C, errors


def fit(lightning: Any, strategy: Any, model: Any = None, *data: Any, **options: Any) -> Any:
    """Returns the trainer; the model is `trainer.lightning_module`."""
    trainer = lightning.pl.Trainer(**{"max_epochs": 2, **QUIET, **options}, strategy=strategy)
    trainer.fit(module(lightning) if model is None else model, *(data or [loader()]))
    return trainer


@on_ranks
def test_accumulation_and_clipping(lightning):
    def train(lightning, strategy):
        steps = []
        model = module(lightning, on_before_optimizer_step=lambda self, _: steps.append(self.global_step))
        fit(lightning, strategy, model, accumulate_grad_batches=3, gradient_clip_val=0.1)
        return weights(model), steps

    _, steps = both(lightning, train)
    assert steps == [0, 1, 2, 3]  # 4 batches an epoch and rank


@on_ranks
def test_the_wrapper_is_there_while_it_trains(lightning):
    seen = []

    def look(self):
        wrapper = self.trainer.strategy.model
        seen.append((type(wrapper), wrapper.find_unused_parameters, dist.get_backend()))

    fit(lightning, "syncengine", module(lightning, on_train_start=look))
    leave()
    fit(lightning, "syncengine_find_unused_parameters_true", module(lightning, on_train_start=look))
    assert seen == [(syncengine.Parallel, False, "syncengine"), (syncengine.Parallel, True, "syncengine")]


@on_ranks
def test_logging_with_sync_dist(lightning):
    """Floats, ints, bools and tensors, means and sums, by step and by epoch."""

    def step(self, batch, index):
        rank, loss = self.global_rank, self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("count", 3 * rank + index, sync_dist=True, reduce_fx="sum")
        self.log("an int", 2 * rank + 1, sync_dist=True)
        self.log("an int tensor", torch.tensor(2 * rank + 1), sync_dist=True)
        self.log("a bool", rank == 0, sync_dist=True)
        self.log("largest", loss.detach(), sync_dist=True, reduce_fx="max")
        self.log("least", loss.detach().double(), sync_dist=True, reduce_fx="min")
        self.log_dict({"a": loss * 2, "b": 1.0 * rank}, sync_dist=True, on_epoch=True)
        return loss

    def train(lightning, strategy):
        model = module(lightning, training_step=step, validation_step=lambda self, *args: step(self, *args) and None)
        trainer = fit(lightning, strategy, model, loader(), loader(seed=4))
        return trainer.callback_metrics, weights(model)

    metrics, _ = both(lightning, train)
    assert float(metrics["an int"]) == 2.0
    assert float(metrics["a bool"]) == 0.5


@on_ranks
def test_early_stopping_and_checkpoints(lightning):
    """Who stops is decided on all ranks; the best checkpoint is the same file with the same bits."""

    def train(lightning, strategy):
        kind = type(strategy).__module__
        callbacks = lightning.pl.callbacks
        best = callbacks.ModelCheckpoint(shared_folder() / kind, monitor="validation", save_last=True)
        stop = callbacks.EarlyStopping("validation", patience=1)
        options = {"enable_checkpointing": True, "max_epochs": 9, "callbacks": [best, stop]}
        model = module(lightning, validation_step=validate)
        trainer = fit(lightning, strategy, model, loader(), loader(seed=4), **options)
        assert trainer.current_epoch == 2 and stop.stopped_epoch == 1
        saved = torch.load(best.best_model_path, weights_only=True)
        return best.best_model_path.rpartition("/")[2], best.best_model_score, saved["state_dict"], weights(model)

    both(lightning, train)


@on_ranks
def test_resume(lightning):
    """Two epochs are two of one, the second from a checkpoint; it changes between DDP and syncengine, too."""
    ddp, ours = lightning.pl.strategies.DDPStrategy, lightning.Strategy

    def train(*kinds):
        def left(trainer):
            return weights(trainer.lightning_module)

        return lightning_ranks.resumed(lightning, kinds, lambda _: module(lightning), left)[0]

    expected = train(ddp, ddp)
    same(expected, train(ours, ours))
    same(expected, train(ddp, ours))


@on_ranks
def test_manual_optimization(lightning):
    """Two optimizers, several backwards a step, also without synchronization."""

    def step(self, batch, index):
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = self.loss(batch) * (number + 1)
            if index == 1:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(self.loss(batch))
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()

    def optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.05) for i in (0, 4)]

    def train(lightning, strategy):
        overrides = {"automatic_optimization": False, "training_step": step, "configure_optimizers": optimizers}
        return weights(fit(lightning, strategy, module(lightning, **overrides)).lightning_module)

    both(lightning, train)
    both(lightning, train, find_unused_parameters=True)


@on_ranks
def test_bfloat16(lightning):
    def train(lightning, strategy, precision):
        return weights(fit(lightning, strategy, precision=precision).lightning_module)

    for precision in ("bf16-mixed", "bf16-true"):
        both(lightning, functools.partial(train, precision=precision))


@on_ranks
def test_sync_batch_norm(lightning):
    """Which DDP refuses on CPUs: compared with one process that has both ranks' batches, in float64."""

    def batches(rank=None):
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            x, y = torch.randn(6, 12, generator=generator), torch.randn(6, 1, generator=generator)
            yield (x.double(), y.double()) if rank is None else (x[rank::2].double(), y[rank::2].double())

    def data(self):
        return DataLoader(list(batches(self.global_rank)), batch_size=None)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    torch.manual_seed(7)
    model = module(lightning, train_dataloader=data, configure_optimizers=sgd)
    model.net[3] = nn.Identity()
    alone = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Identity(), nn.Linear(40, 1)).double()
    options = {"precision": "64-true", "sync_batchnorm": True, "use_distributed_sampler": False}
    trainer = lightning.pl.Trainer(**QUIET, **options, max_epochs=1, strategy="syncengine")
    alone.load_state_dict(model.net.double().state_dict())
    trainer.fit(model)
    optimizer = sgd(alone)
    for x, y in batches():
        optimizer.zero_grad()
        (alone(x) - y).square().mean().backward()
        optimizer.step()
    assert not any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())  # reverted after fit
    for one, other in zip(alone.state_dict().values(), model.net.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@on_ranks
def test_a_sampler_fills_up_uneven_data(lightning):
    """21 samples on 2 ranks in batches of 4: the last ones are short, and one sample comes twice."""

    def train(lightning, strategy):
        sizes = []
        model = module(lightning, on_train_batch_start=lambda self, batch, i: sizes.append(len(batch[0])))
        fit(lightning, strategy, model, loader(21, batch=4))
        return weights(model), sizes

    _, sizes = both(lightning, train)
    assert sizes == [4, 4, 3] * 2


@on_ranks
def test_a_rank_with_fewer_batches_is_named(lightning):
    """To the others, which over DDP hang until a timeout."""

    def data(self):
        return DataLoader(lightning_ranks.samples(), batch_size=8 if self.global_rank else 4)

    model = module(lightning, train_dataloader=data)
    trainer = lightning.pl.Trainer(**QUIET, max_epochs=1, strategy="syncengine", use_distributed_sampler=False)
    if int(os.environ["RANK"]) == 1:  # 3 batches instead of 6
        trainer.fit(model)
        leave()
        return
    with pytest.raises(errors.PeerLost, match="rank 1"):
        trainer.fit(model)


@on_ranks
def test_validate_fit_test_and_predict(lightning):
    """In one process, validation under inference_mode first; collectives of users in between."""

    def look(self, batch, index):
        gathered = self.all_gather({"loss": self.loss(batch), "index": index})
        self.log("gathered", gathered["loss"].mean(), sync_dist=True)
        return gathered["loss"]

    def train(lightning, strategy):
        found = []
        hooks = dict.fromkeys(("validation_step", "test_step"), look)
        hooks["predict_step"] = lambda self, batch, index: self(batch[0])
        model = module(lightning, **hooks)
        trainer = lightning.pl.Trainer(**QUIET, max_epochs=1, strategy=strategy, num_sanity_val_steps=1)
        found.append(trainer.validate(model, loader(seed=4), verbose=False))
        trainer.fit(model, loader(), loader(seed=4))
        found.append(trainer.test(model, loader(seed=5), verbose=False))
        found.append(trainer.predict(model, loader(seed=6)))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader())
        return found, weights(model)

    both(lightning, train)


@on_ranks
def test_collectives_of_the_strategy(lightning):
    def collectives(self):
        rank, strategy = self.global_rank, self.trainer.strategy
        strategy.barrier("a name")
        self.found = [
            strategy.broadcast({"from": rank, "tensor": torch.ones(2) * rank}, src=1),
            strategy.broadcast(None if rank else Path("/a/path")),
            [strategy.reduce(torch.tensor(3 * rank + 2), reduce_op=op) for op in ("mean", "sum", "max")],
            strategy.reduce(torch.tensor([-3, 4]) * rank, reduce_op="mean"),
            strategy.reduce(torch.tensor([1.5, 2.5]).bfloat16() * rank),
            strategy.reduce("no tensor"),
            strategy.reduce_boolean_decision(rank == 0),
            strategy.reduce_boolean_decision(rank == 0, all=False),
            strategy.all_gather(torch.arange(3) + rank),
        ]

    def train(lightning, strategy):
        model = module(lightning, on_train_start=collectives)
        fit(lightning, strategy, model, max_epochs=1)
        return model.found

    found = both(lightning, train)
    assert found[0]["from"] == 1 and found[6:8] == [False, True]


@on_ranks
def test_a_communication_hook(lightning):
    """Lightning registers hooks on CUDA only, and says nothing of it; here also on CPUs: as under DDP with the hook."""

    def train(strategy):
        torch.manual_seed(7)
        trainer = fit(lightning, strategy)
        leave()
        return weights(trainer.lightning_module)

    class WithHook(lightning.pl.strategies.DDPStrategy):
        def _register_ddp_hooks(self):
            self.model.register_comm_hook(None, fp16_compress_hook)

    ours, theirs = train(lightning.Strategy(ddp_comm_hook=fp16_compress_hook)), train(WithHook())
    same(ours, theirs)
    assert not torch.equal(ours["net.0.weight"], train(lightning.Strategy())["net.0.weight"])


@on_ranks
def test_unused_parameters(lightning):
    """The error names the strategy that finds them, which does."""

    def unused():
        model = module(lightning)
        model.unused = nn.Linear(3, 3)
        return model

    with pytest.raises(RuntimeError) as error:
        fit(lightning, "syncengine", unused())
    assert "strategy='syncengine_find_unused_parameters_true'" in str(error.value)
    assert f"syncengine.{lightning.name}.Strategy(find_unused_parameters=True)" in str(error.value)
    assert "ddp" not in str(error.value).lower()
    leave()

    def train(lightning, strategy):
        return weights(fit(lightning, strategy, unused()).lightning_module)

    both(lightning, train, find_unused_parameters=True)


@on_ranks
def test_another_process_group(lightning):
    def train(kind):
        torch.manual_seed(7)
        trainer = fit(lightning, kind(process_group_backend="gloo"))
        assert dist.get_backend() == "gloo"
        leave()
        return weights(trainer.lightning_module)

    same(train(lightning.pl.strategies.DDPStrategy), train(lightning.Strategy))


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_ddp_over_the_backend(tmp_path: Path, name: str):
    """Lightning's own DDPStrategy with `process_group_backend="syncengine"`, in a script that imports no syncengine."""
    script = ROOT / "tests" / "scripts" / "lightning_backend.py"
    for backend in ("gloo", "syncengine"):
        said = over_gloo(torchrun, script, name, backend, tmp_path / backend, home=tmp_path)
        assert f"DistributedDataParallel over {backend}" in said
    same(load(tmp_path / "syncengine"), load(tmp_path / "gloo"))


@on_ranks
def test_stats_in_log_dict(lightning):
    """`Parallel` is the strategy's `model`: docs/doctor.md says so."""

    def step(self, batch, index):
        self.log_dict(self.trainer.strategy.model.stats())
        return self.loss(batch)

    model = module(lightning, training_step=step)
    trainer = fit(lightning, "syncengine", model)
    assert trainer.global_step == 8
    assert trainer.callback_metrics.keys() == KEYS
    bytes_of_a_step = sum(p.numel() * p.element_size() for p in model.parameters())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["steps"] == 7  # before the last one
    assert logged["reduced_bytes"] == bytes_of_a_step and logged["total_reduced_bytes"] == 7 * bytes_of_a_step
    assert logged["step_ms"] > 0 and logged["exposed_sync_ms"] > 0


@on_ranks
def test_loggers_get_who_is_late(lightning):
    """By themselves, as often as anything else, and once for each step, however many batches it has."""
    folder = shared_folder() / lightning.pl.__name__
    logger = lightning.pl.loggers.CSVLogger(folder, version=0)
    options = {"logger": logger, "log_every_n_steps": 2, "accumulate_grad_batches": 2, "max_epochs": 4}
    trainer = fit(lightning, "syncengine", **options)
    if trainer.global_rank == 0:
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("syncengine/latest_rank")]
        assert [int(row["step"]) for row in rows] == [2, 4, 6]  # of 8
        for row in rows:
            assert float(row["syncengine/latest_rank"]) in (0.0, 1.0)
            assert float(row["syncengine/step_ms"]) > float(row["syncengine/latest_rank_ms"]) >= 0


@on_ranks
def test_wrong_devices(lightning):
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="No supported gpu backend found|CUDAAccelerator"):
            lightning.pl.Trainer(**QUIET | {"accelerator": "gpu"}, strategy="syncengine")
    strategy = lightning.Strategy(parallel_devices=[torch.device("meta")] * 2)
    with pytest.raises(errors.InvalidUsage, match=r"trains on CPUs and CUDA devices, not on meta.*accelerator='cpu'"):
        strategy._get_process_group_backend()
    if not _C.has_cuda:
        strategy = lightning.FabricStrategy(parallel_devices=[torch.device("cuda", 0)] * 2)
        with pytest.raises(errors.InvalidUsage, match=r"built without CUDA.*accelerator='cpu'"):
            strategy._get_process_group_backend()
