"""Parallel in DDP's place for programs that `import lightning`.

Programs that `import pytorch_lightning`, a separate tree of the same classes, need `syncengine.pytorch_lightning`.

import syncengine.lightning  # registers the name

lightning.Trainer(accelerator="cpu", devices=2, strategy="syncengine")
lightning.Fabric(accelerator="cpu", devices=2, strategy="syncengine")

`strategy=syncengine.lightning.Strategy(...)`, and for Fabric `FabricStrategy(...)`, take the arguments of Lightning's
`DDPStrategy`, and pass those of DDP on to `Parallel`. The process group is syncengine's unless
`process_group_backend` says otherwise.
"""

from lightning.fabric import strategies as fabric
from lightning.pytorch import callbacks, strategies

from syncengine._lightning import make

Strategy, FabricStrategy, _BeforeAverages = make(__name__, callbacks, strategies, fabric)
