"""The common part of the strategies for ``lightning`` and for ``pytorch_lightning``; imports neither.

These two are separate trees of the same classes, so each mixin here is put before the DDPStrategy of either.
"""

from collections.abc import Callable
from typing import Any

import torch

import syncengine  # registers the backend
from syncengine._C import has_cuda
from syncengine.errors import InvalidUsage
from syncengine.parallel import Parallel
from syncengine.parallel.summary import for_loggers
from syncengine.sharded import ShardedOptimizer
from syncengine.sharded.claims import unload
from syncengine.torch_backend import NAME

UNUSED = f"{NAME}_find_unused_parameters_true"


class InPlaceOfDDP:
    """A mixin of strategies: the process group has the engine's backend, and Parallel wraps in place of DDP."""

    root_device: torch.device
    _process_group_backend: str | None
    _ddp_kwargs: dict[str, Any]

    def _get_process_group_backend(self) -> str:
        device = self.root_device
        if device.type not in ("cpu", "cuda"):
            raise InvalidUsage(
                f"the strategy {NAME!r} trains on CPUs and CUDA devices, not on {device.type}: give "
                "accelerator='cpu', or another strategy"
            )
        if device.type == "cuda" and not has_cuda:
            raise InvalidUsage(
                f"the strategy {NAME!r} was asked for {device}, and syncengine was built without CUDA: give "
                "accelerator='cpu', or, with nvcc and a torch that has CUDA, build it in a checkout ("
                "pip install --no-build-isolation --force-reinstall --no-deps .)"
            )
        return self._process_group_backend or (NAME if device.type == "cpu" else f"cpu:{NAME},cuda:nccl")

    def _wrap(self, module: torch.nn.Module) -> Parallel:
        device = self.root_device
        return Parallel(module, device_ids=None if device.type == "cpu" else [device.index], **self._ddp_kwargs)


class BeforeAverages:
    """A callback that runs before callbacks of Lightning's that write averages of the weights on each rank.

    They write by ``.data`` on each rank, so it makes weights private that ranks share; the next step shares them again.
    """

    def on_train_epoch_start(self, trainer: Any, module: torch.nn.Module) -> None:
        """Brings the weights into private memory for the last epoch of StochasticWeightAveraging, which writes them."""
        if any(trainer.current_epoch > getattr(each, "swa_end", trainer.current_epoch) for each in trainer.callbacks):
            unload(module)

    def on_validation_epoch_start(self, trainer: Any, module: torch.nn.Module) -> None:
        """Brings the weights into private memory: WeightAveraging swaps them with averages for validation, and back."""
        unload(module)

    on_validation_epoch_end = on_train_end = on_validation_epoch_start


class TrainerSeam(InPlaceOfDDP):
    """The mixin for the strategy of Lightning's ``Trainer``."""

    averaging: tuple[type, ...]  # Lightning's callbacks that average weights
    before_averages: type  # BeforeAverages, as one of its callbacks

    model: Any
    lightning_module: Any
    _logged = 0  # the step
    _ddp_comm_state: Any
    _ddp_comm_hook: Callable[..., Any] | None
    _ddp_comm_wrapper: Callable[..., Any] | None

    def setup(self, trainer: Any) -> None:
        """Inserts ``BeforeAverages`` before callbacks that average weights, if a ShardedOptimizer has these weights."""
        super().setup(trainer)  # type: ignore[misc] # of the DDPStrategy behind
        callbacks = trainer.callbacks
        shares = any(isinstance(optimizer, ShardedOptimizer) for optimizer in trainer.optimizers)
        averages = any(isinstance(each, self.averaging) for each in callbacks)
        if shares and averages and not any(isinstance(each, self.before_averages) for each in callbacks):
            callbacks.insert(0, self.before_averages())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Gives the trainer's loggers the times of steps, and the latest rank, every ``log_every_n_steps`` steps."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc] # of the DDPStrategy behind
        trainer = self.lightning_module.trainer
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step % every == 0 and step != self._logged:
            self._logged = step
            if numbers := for_loggers(self.model.stats()):
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=step)

    def _setup_model(self, model: torch.nn.Module) -> Parallel:
        return self._wrap(model)

    def _register_ddp_hooks(self) -> None:
        """Registers communication hooks on CPUs, too, where Lightning would silently leave them out."""
        hook = self._ddp_comm_hook
        if hook is not None:
            wrapper = self._ddp_comm_wrapper
            self.model.register_comm_hook(self._ddp_comm_state, hook if wrapper is None else wrapper(hook))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict. A ShardedOptimizer's is whole on every rank: Lightning would expect it on rank 0 alone."""
        plain = getattr(optimizer, "_optimizer", optimizer)  # a LightningOptimizer holds it
        if isinstance(plain, ShardedOptimizer):
            return plain.state_dict()
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc] # of the DDPStrategy behind
        return state

    def on_exception(self, exception: BaseException) -> None:
        """Names this strategy in the advice about unused parameters, where Lightning would name one of DDP."""
        text = str(exception.args[0]) if exception.args else ""
        if "Expected to have finished reduction in the prior iteration" in text:
            remedy = (
                "It looks like your LightningModule has parameters that were not used in producing the loss returned "
                f"by training_step. If this is intentional, give Trainer(strategy={UNUSED!r}), or "
                f"{type(self).__module__}.Strategy(find_unused_parameters=True)."
            )
            exception.args = (f"{remedy}\n{'=' * 80}\n{text}", *exception.args[1:])


class FabricSeam(InPlaceOfDDP):
    """The mixin for the strategy of Lightning's ``Fabric``."""

    def setup_module(self, module: torch.nn.Module) -> Parallel:
        """Wraps the model in ``Parallel``."""
        return self._wrap(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict of an optimizer. That of a ShardedOptimizer is whole on every rank."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_dict()
        state: dict[str, Any] = super().get_optimizer_state(optimizer)  # type: ignore[misc]
        return state


def make(module: str, callbacks: Any, strategies: Any, fabric: Any) -> tuple[Any, Any, Any]:
    """Makes strategies for ``Trainer`` and ``Fabric``, from the packages of one of the two trees, and registers them.

    Returns both, and the callback that the first one adds. The caller makes all three attributes of ``module``.
    """
    own = {"__module__": module, "__doc__": "Takes the arguments of Lightning's `DDPStrategy`."}
    before = type("_BeforeAverages", (BeforeAverages, callbacks.Callback), {"__module__": module})
    averaging = {
        "averaging": (callbacks.WeightAveraging, callbacks.StochasticWeightAveraging),
        "before_averages": before,
    }
    of_trainer = type("Strategy", (TrainerSeam, strategies.DDPStrategy), own | averaging)
    of_fabric = type("FabricStrategy", (FabricSeam, fabric.DDPStrategy), own)
    text = f"syncengine {syncengine.__version__}: Parallel in DDP's place"
    for registry, strategy in ((strategies.StrategyRegistry, of_trainer), (fabric.STRATEGY_REGISTRY, of_fabric)):
        registry.register(NAME, strategy, description=text, override=True)
        unused = f"{text}, with find_unused_parameters"
        registry.register(UNUSED, strategy, description=unused, override=True, find_unused_parameters=True)
    return of_trainer, of_fabric, before
