"""Parallel in DDP's place for programs that `import pytorch_lightning`: see `syncengine.lightning`."""

from lightning_fabric import strategies as fabric
from pytorch_lightning import callbacks, strategies

from syncengine._lightning import make

Strategy, FabricStrategy, _BeforeAverages = make(__name__, callbacks, strategies, fabric)
