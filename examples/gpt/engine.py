"""The lines in which torch's DistributedDataParallel and syncengine differ: `init`, the wrapping, the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ENGINES = ("syncengine", "ddp", "sharded")  # sharded: syncengine with its ShardedOptimizer


@dataclass(frozen=True)
class World:
    """This process's place among the ranks, and the two collectives that the measurements need."""

    rank: int
    size: int
    barrier: Callable[[], object]
    maximum: Callable[[Tensor], object]  # over all ranks, in place


@contextmanager
def data_parallel(model: nn.Module, engine: str, numerics: str) -> Iterator[tuple[nn.Module, World]]:
    """`model`, its gradients averaged over all ranks of this launch."""
    if engine != "ddp":
        import syncengine  # here, so that the comparison run never loads it

        syncengine.init(numerics=numerics)
        model = syncengine.Parallel(model)

        def maximum(tensor: Tensor) -> object:
            return syncengine.all_reduce(tensor, op="max")

        yield model, World(syncengine.rank(), syncengine.world_size(), syncengine.barrier, maximum)
        syncengine.shutdown()
    else:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)

        def maximum(tensor: Tensor) -> object:
            return dist.all_reduce(tensor, dist.ReduceOp.MAX)

        yield model, World(dist.get_rank(), dist.get_world_size(), dist.barrier, maximum)
        dist.destroy_process_group()


def adamw(model: nn.Module, engine: str, **options: Any) -> torch.optim.Optimizer:
    """torch's AdamW on each rank, or shared between them."""
    if engine == "sharded":
        import syncengine

        return syncengine.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return torch.optim.AdamW(model.parameters(), **options)
