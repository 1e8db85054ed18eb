"""A gradient synchronization engine for PyTorch.

`syncengine.init()` finds torchrun, mpirun, srun or an initialised torch.distributed by itself, and
`model = syncengine.Parallel(model)` has the signature of DistributedDataParallel. No other line of a script changes.
"""

import torch  # loads the libraries that the extension needs

from syncengine import errors, hooks
from syncengine._C import Communicator, Work
from syncengine.communicator import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    default_communicator,
    empty,
    init,
    is_initialized,
    local_rank,
    rank,
    reduce_scatter,
    shutdown,
    world_size,
)
from syncengine.parallel import Parallel
from syncengine.torch_backend import register as _register

if torch.distributed.is_available():
    _register()

__all__ = [
    "Communicator",
    "Parallel",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "default_communicator",
    "empty",
    "errors",
    "hooks",
    "init",
    "is_initialized",
    "local_rank",
    "rank",
    "reduce_scatter",
    "shutdown",
    "world_size",
]
