"""Lightning Fabric: --strategy ddp is the same training over DistributedDataParallel.

torchrun --nproc-per-node 2 examples/with_fabric.py
python examples/with_fabric.py  # Fabric starts the other process
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncengine.lightning  # noqa: F401 (registers the strategy)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="syncengine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    devices = int(os.environ.get("WORLD_SIZE", "2"))
    fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=options.strategy)
    fabric.launch()
    fabric.seed_everything(1)
    module = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.01))
    x = torch.randn(512, 16)
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32))

    for _epoch in range(3):
        for i, (inputs, targets) in enumerate(data):
            accumulates = i % 2 == 0
            with fabric.no_backward_sync(model) if accumulates else nullcontext():
                loss = (model(inputs) - targets).square().mean()
                fabric.backward(loss / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {mean:.4f}")
    if options.out and fabric.is_global_zero:
        torch.save(module.state_dict(), options.out)
