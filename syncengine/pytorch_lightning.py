"""Parallel in DDP's place for programs that `import pytorch_lightning`: see `syncengine.lightning`.

import syncengine.pytorch_lightning  # registers the name

pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy="syncengine")
lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="syncengine")
"""

from lightning_fabric import strategies as fabric
from pytorch_lightning import callbacks, strategies

from syncengine._lightning import make

Strategy, FabricStrategy, _BeforeAverages = make(__name__, callbacks, strategies, fabric)
