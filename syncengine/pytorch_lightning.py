"""Parallel in DDP's place for those who `import pytorch_lightning`.

Those who `import lightning`, a separate tree of the same classes, need `syncengine.lightning`.

import syncengine.pytorch_lightning  # registers the name

pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy="syncengine")
lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="syncengine")

Or `strategy=syncengine.pytorch_lightning.Strategy(...)`, for Fabric `FabricStrategy(...)`: they take the
arguments of Lightning's `DDPStrategy`, and pass those of DDP on to `Parallel`. The process group is syncengine's unless
`process_group_backend` says otherwise.
"""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as _FabricDDP
from pytorch_lightning import callbacks
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from syncengine._lightning import BeforeAverages, FabricSeam, TrainerSeam, register


class _BeforeAverages(BeforeAverages, callbacks.Callback):  # type: ignore[misc] # mypy has no Lightning
    pass


class Strategy(TrainerSeam, DDPStrategy):  # type: ignore[misc]
    """For `Trainer(strategy=...)`: the arguments of Lightning's `DDPStrategy`."""

    averaging = (callbacks.WeightAveraging, callbacks.StochasticWeightAveraging)
    before_averages = _BeforeAverages


class FabricStrategy(FabricSeam, _FabricDDP):  # type: ignore[misc]
    """For `Fabric(strategy=...)`: the arguments of Lightning's `DDPStrategy` for Fabric."""


register(StrategyRegistry, Strategy)
register(STRATEGY_REGISTRY, FabricStrategy)
