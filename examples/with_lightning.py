"""Lightning's Trainer: --strategy ddp is the same training over DistributedDataParallel.

torchrun --nproc-per-node 2 examples/with_lightning.py
python examples/with_lightning.py  # Lightning starts the other process
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncengine.lightning  # noqa: F401 (registers the strategy)


class Regression(lightning.LightningModule):
    """Learns the sine of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch, averaged over the ranks where it is logged."""
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer: Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="syncengine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    lightning.seed_everything(1)
    x = torch.randn(512, 16)
    samples = TensorDataset(x, x.sum(1, keepdim=True).sin())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "2")),
        strategy=options.strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        **{"logger": False, "enable_checkpointing": False},
    )
    model = Regression()
    trainer.fit(model, DataLoader(samples, batch_size=32))  # Lightning gives each rank its part
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss_epoch']:.4f}")
        if options.out:
            torch.save(model.state_dict(), options.out)
