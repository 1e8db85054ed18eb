"""Lightning's callbacks that write averages of the weights into the model, over weights that the ranks share."""

import functools
from typing import Any

import pytest
import torch
from lightning_ranks import both, loader, net, on_ranks, shared_folder, validate, weights
from sharded_training import is_common
from test_sharded_lightning import fit, is_ours, model_for, optimizer_of
from torch.optim.swa_utils import get_ema_avg_fn

from syncengine.errors import InvalidUsage


def model_of(lightning: Any, strategy: Any, **overrides: Any) -> Any:
    def configure(self):
        return optimizer_of(strategy, self.parameters())

    def look(self, *_):
        assert all(is_common(p) == is_ours(strategy) for p in self.parameters())  # again, where they were private

    after = {"on_train_epoch_end": lambda self: None, "on_train_batch_end": look}
    return model_for(lightning, strategy, **{"configure_optimizers": configure, **after, **overrides})


def averages(lightning: Any, kind: str, options: dict[str, Any], **overrides: Any) -> None:
    """The same fit, and more of it: the checkpoint of each epoch, what validation saw, and the weights."""

    def train(lightning, strategy):
        path = shared_folder() / type(strategy).__module__
        model = model_of(lightning, strategy, **overrides)
        every = lightning.pl.callbacks.ModelCheckpoint(path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        callbacks = [getattr(lightning.pl.callbacks, kind)(**options), every]
        trainer = fit(lightning, strategy, model, max_epochs=4, enable_checkpointing=True, callbacks=callbacks)
        first = weights(trainer.lightning_module)
        trainer.fit_loop.max_epochs = 6
        trainer.fit(model, loader(), loader(seed=4))  # another optimizer, of weights that this one has left private
        saved = {file.name: torch.load(file, weights_only=False) for file in sorted(path.glob("*.ckpt"))}
        assert len(saved) >= 4
        states = {name: (each["state_dict"], each["optimizer_states"]) for name, each in saved.items()}
        return first, weights(trainer.lightning_module), states, trainer.callback_metrics

    both(lightning, train)


@on_ranks
def test_weight_averaging(lightning):
    averages(lightning, "WeightAveraging", {"avg_fn": get_ema_avg_fn(0.9)})


@on_ranks
def test_weight_averaging_with_validation(lightning):
    averages(lightning, "WeightAveraging", {"avg_fn": get_ema_avg_fn(0.9)}, validation_step=validate)


@on_ranks
def test_ema_weight_averaging_from_the_third_step_on(lightning):
    averages(lightning, "EMAWeightAveraging", {"decay": 0.8, "update_starting_at_step": 2}, validation_step=validate)


@on_ranks
def test_stochastic_weight_averaging(lightning):
    """Without batch norms, and with those, for which there is an epoch more."""

    def train(lightning, strategy, norm):
        model = model_of(lightning, strategy, on_train_batch_end=lambda self, *_: None)  # its last epoch has no step
        model.net = net(norm)
        own = lightning.pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        return weights(fit(lightning, strategy, model, max_epochs=4, callbacks=[own]).lightning_module)

    for norm in (False, True):
        both(lightning, functools.partial(train, norm=norm))


@on_ranks
def test_an_edit_before_the_averages_come_is_named(lightning):
    """It would be lost in what comes from there."""

    def edit(self):
        with torch.no_grad():
            self.net[0].weight.mul_(2)

    model = model_of(lightning, lightning.Strategy(), on_validation_start=edit, validation_step=validate)
    own = lightning.pl.callbacks.WeightAveraging()
    with pytest.raises(InvalidUsage, match=r"net.0.weight was written to outside of ShardedOptimizer.step"):
        fit(lightning, lightning.Strategy(), model, num_sanity_val_steps=0, callbacks=[own])
