"""ShardedOptimizer in Lightning's Trainer: bit for bit as torch's own optimizer over DDP and Gloo."""

import copy
import functools
from typing import Any

import lightning_ranks
import torch
from lightning_ranks import QUIET, both, loader, module, on_ranks, same, samples, shared_folder, validate, weights
from sharded_training import is_common

import syncengine


def optimizer_of(strategy: Any, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """AdamW: sharded over syncengine, torch's over DDP."""
    options = {"lr": 0.01, **options}
    if is_ours(strategy):
        return syncengine.ShardedOptimizer(parameters, torch.optim.AdamW, **options)
    return torch.optim.AdamW(parameters, **options)


def is_ours(strategy: Any) -> bool:
    return type(strategy).__module__.startswith("syncengine")


def model_for(lightning: Any, strategy: Any, **overrides: Any) -> Any:
    """With a scheduler of each step, and a look at where the weights lie."""

    def configure(self):
        optimizer = optimizer_of(strategy, self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def look(self, *_):
        assert all(is_common(p) == is_ours(strategy) for p in self.parameters())

    return module(lightning, **{"configure_optimizers": configure, "on_train_epoch_end": look, **overrides})


def fit(lightning: Any, strategy: Any, model: Any, **options: Any) -> Any:
    trainer = lightning.pl.Trainer(**{"max_epochs": 2, **QUIET, **options}, strategy=strategy)
    trainer.fit(model, loader(), loader(seed=4))
    return trainer


def results(trainer: Any) -> Any:
    return weights(trainer.lightning_module), copy.deepcopy([each.state_dict() for each in trainer.optimizers])


@on_ranks
def test_fit_with_accumulation_clipping_and_validation(lightning):
    def train(lightning, strategy):
        model = model_for(lightning, strategy, validation_step=validate)
        trainer = fit(lightning, strategy, model, accumulate_grad_batches=3, gradient_clip_val=0.1)
        return results(trainer), trainer.callback_metrics, trainer.global_step

    assert both(lightning, train)[2] == 4  # 4 batches an epoch and rank


@on_ranks
def test_fit_goes_on(lightning):
    """A second `fit` of the same module makes a new optimizer, of weights that the first has shared."""

    def train(lightning, strategy):
        model = model_for(lightning, strategy)
        trainer = fit(lightning, strategy, model)
        first = results(trainer)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, loader())
        assert trainer.global_step == 16
        return first, results(trainer)

    both(lightning, train)


@on_ranks
def test_resume(lightning):
    """Two epochs are two of one, the second from a checkpoint, which is the same for plain and sharded ones."""
    ddp, ours = lightning.pl.strategies.DDPStrategy, lightning.Strategy

    def train(*kinds):
        make = functools.partial(model_for, lightning)
        left, path = lightning_ranks.resumed(lightning, kinds, make, results)
        saved = torch.load(path, weights_only=True)
        return left, saved["state_dict"], saved["optimizer_states"]

    expected = train(ddp, ddp)
    for kinds in ((ours, ours), (ddp, ours), (ours, ddp)):
        same(expected, train(*kinds))


@on_ranks
def test_early_stopping_with_the_best_checkpoint(lightning):
    def train(lightning, strategy):
        callbacks = lightning.pl.callbacks
        best = callbacks.ModelCheckpoint(shared_folder() / type(strategy).__module__, monitor="validation")
        model = model_for(lightning, strategy, validation_step=validate)
        options = {"enable_checkpointing": True, "callbacks": [best, callbacks.EarlyStopping("validation", patience=1)]}
        trainer = fit(lightning, strategy, model, max_epochs=9, **options)
        saved = torch.load(best.best_model_path, weights_only=True)
        return results(trainer), best.best_model_score, saved["state_dict"], saved["optimizer_states"]

    both(lightning, train)


@on_ranks
def test_manual_optimization(lightning):
    """Two optimizers of one model, several backwards a step."""

    def step(self, batch, index):
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * (number + 1))
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()

    def train(lightning, strategy):
        def optimizers(self):
            return [optimizer_of(strategy, self.net[i].parameters(), lr=0.01 * (i + 1)) for i in (0, 4)]

        look = {"on_train_epoch_end": lambda self: None}  # BatchNorm's belong to none
        overrides = {"automatic_optimization": False, "training_step": step, "configure_optimizers": optimizers}
        return results(fit(lightning, strategy, model_for(lightning, strategy, **overrides, **look)))

    both(lightning, train)


@on_ranks
def test_fabric(lightning):
    """`setup` makes the optimizer's wrapper, `save` and `load` its checkpoints."""

    def train(lightning, strategy):
        fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.GELU(), torch.nn.Linear(40, 1))
        model, optimizer = fabric.setup(model, optimizer_of(strategy, model.parameters()))
        data = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=3))
        path = shared_folder() / type(strategy).__module__
        for epoch in range(3):
            for number, (x, y) in enumerate(data):
                with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                    fabric.backward((model(x) - y).square().mean())
                if number % 2:
                    fabric.clip_gradients(model, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 0:
                fabric.save(path, {"model": model, "optimizer": optimizer})
            if epoch == 1:
                after_two = weights(model)
                fabric.load(path, {"model": model, "optimizer": optimizer})  # back to the first
        same(after_two, weights(model))
        return weights(model), copy.deepcopy(optimizer.state_dict())

    both(lightning, train, fabric=True)
