"""Trains with Lightning on the ranks of the pool: over DDP and Gloo, then with syncengine, and compares the bits."""

import importlib
import os
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from ports import unused_ports
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

TREES = ("lightning", "pytorch_lightning")
QUIET = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def tree(name: str) -> types.SimpleNamespace:
    """One of Lightning's two class trees: `pl`, `Fabric`, its strategies, and syncengine's."""
    ours = importlib.import_module(f"syncengine.{name}")
    trainer = importlib.import_module("lightning.pytorch" if name == "lightning" else name)
    fabric = importlib.import_module("lightning.fabric" if name == "lightning" else "lightning_fabric")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    return types.SimpleNamespace(
        name=name, pl=trainer, fabric=fabric, Strategy=ours.Strategy, FabricStrategy=ours.FabricStrategy
    )


def launched(ports: list[int]) -> dict[str, str]:
    """As torchrun's processes have it. Each process group of a test gets a port of its own: see `leave`."""
    first, *rest = map(str, ports)
    return {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "MASTER_PORT": first, "TESTS_PORTS": " ".join(rest)}


def leave() -> None:
    """Ends the process group. The next one meets at another port, where no store of this one is about to end."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"], _, os.environ["TESTS_PORTS"] = os.environ["TESTS_PORTS"].partition(" ")


def both(lightning: types.SimpleNamespace, train: Callable[..., Any], fabric: bool = False, **options: Any) -> Any:
    """`train(lightning, strategy)` over DDP and with syncengine: what they return must have the same bits.

    Also compares with the other rank. Returns what syncengine's run returned.
    """
    results = []
    for ours in (False, True):
        torch.manual_seed(7)  # the same weights; the data differ between ranks by their sampler
        if ours:
            strategy = (lightning.FabricStrategy if fabric else lightning.Strategy)(**options)
        else:
            module = lightning.fabric if fabric else lightning.pl
            strategy = module.strategies.DDPStrategy(process_group_backend="gloo", **options)
        results.append(train(lightning, strategy))
        if dist.is_initialized():
            assert dist.get_backend() == ("syncengine" if ours else "gloo")
            leave()
    same(*results)
    return results[1]


def same(one: Any, other: Any, where: str = "") -> None:
    """Raises AssertionError with the place of the first difference."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), f"{where}: {one} and {other}"
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{i}]")
    else:
        assert one == other, f"{where}: {one} and {other}"


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def samples(count: int = 24, seed: int = 3) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True).sin())


def loader(count: int = 24, batch: int = 3, seed: int = 3) -> DataLoader:
    return DataLoader(samples(count, seed), batch_size=batch)


def net(norm: bool = True) -> nn.Sequential:
    layers = [nn.Linear(12, 40), nn.BatchNorm1d(40)] if norm else [nn.Linear(12, 40)]
    return nn.Sequential(*layers, nn.GELU(), nn.Dropout(0.2), nn.Linear(40, 1))


def module(lightning: types.SimpleNamespace, **overrides: Any) -> Any:
    """A LightningModule: `overrides` take the place of its attributes and methods."""

    class Regression(lightning.pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return (self(batch[0]) - batch[1]).square().mean()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return type("Model", (Regression,), overrides)()


def validate(self: Any, batch: list[torch.Tensor], index: int) -> None:
    """A validation step of such a module: its loss, and a number that gets worse with each epoch."""
    loss = self.loss(batch)
    self.log("loss of validation", loss, sync_dist=True)  # all of its bits, which the sum below rounds
    self.log("validation", loss + self.current_epoch, sync_dist=True)


def resumed(
    lightning: types.SimpleNamespace, kinds: Any, make: Callable[[Any], Any], left: Callable[[Any], Any]
) -> tuple[Any, Path]:
    """An epoch, and one more from its checkpoint, with a strategy of each of `kinds`, which trains `make(strategy)`.

    Returns what the second has `left`, and the checkpoint.
    """
    path = shared_folder() / f"{'-'.join(kind.__module__ for kind in kinds)}.ckpt"
    for epoch, kind in enumerate(kinds, 1):
        torch.manual_seed(6 + epoch)
        strategy = kind()
        model = make(strategy)
        trainer = lightning.pl.Trainer(**QUIET, max_epochs=epoch, strategy=strategy)
        torch.manual_seed(10 + epoch)  # of dropout
        trainer.fit(model, loader(), ckpt_path=path if epoch > 1 else None)
        if epoch == 1:
            trainer.save_checkpoint(path)
        assert trainer.global_step == 4 * epoch
        result = left(trainer)
        leave()
    return result, path


def shared_folder() -> Path:
    """The same on both ranks, gone with the test."""
    return Path(os.environ["TESTS_FOLDER"])


def on_ranks(function: Callable[..., Any], trees: Sequence[str | None] = TREES) -> Callable[..., None]:
    """Makes `function(lightning)` for 2 ranks into a test with each of Lightning's class trees."""

    @pytest.mark.parametrize("name", trees)
    def test(pool: RankPool, name: str | None, tmp_path: Path) -> None:
        environ = launched(unused_ports(8)) | {"TESTS_FOLDER": str(tmp_path)}
        pool.run(_call, function.__module__, function.__name__, name, settings=None, environ=environ, timeout=180)

    test.__doc__ = function.__doc__
    test.on_ranks = function
    return test


def run_alone(function: Callable[[], Any]) -> Callable[..., None]:
    """The same for `function()`, of other frameworks."""
    return on_ranks(function, [None])


def _call(module_name: str, name: str, tree_name: str | None) -> None:
    function = getattr(importlib.import_module(module_name), name).on_ranks
    function() if tree_name is None else function(tree(tree_name))
