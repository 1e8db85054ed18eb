"""A script for Lightning that knows nothing of syncengine: what the process group is made of is an argument. See
tests/integrations/test_lightning.py.

torchrun --nproc-per-node 2 lightning_backend.py lightning.pytorch gloo weights.pt
"""

import importlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

name, backend, output = sys.argv[1:]
pl = importlib.import_module(name)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Linear(40, 1))

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_start(self):
        if self.global_rank == 0:
            print(type(self.trainer.strategy.model).__name__, "over", torch.distributed.get_backend(), flush=True)


pl.seed_everything(1)
x = torch.randn(48, 12)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
strategy = pl.strategies.DDPStrategy(process_group_backend=backend)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **quiet)
model = Regression()
assert "syncengine" not in sys.modules
trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4))
if trainer.is_global_zero:
    torch.save(model.state_dict(), output)
