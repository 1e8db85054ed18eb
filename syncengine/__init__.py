"""A gradient synchronization engine for PyTorch.

`syncengine.init()` detects torchrun, mpirun, srun or an initialised torch.distributed, and
`model = syncengine.Parallel(model)` has the signature of DistributedDataParallel. No other line of a script changes.
"""

import contextlib
import importlib.metadata

import syncengine_autoload

try:
    import torch  # loads the libraries that the extension needs

    from syncengine import _extension  # noqa: F401 (says so if there is no extension)
except (ImportError, OSError) as error:  # OSError: a library of torch's
    from syncengine.doctor.rescue import examine_instead

    examine_instead(error)  # if this is `syncengine doctor`; it does not return then
    if not syncengine_autoload.tells_itself:
        with contextlib.suppress(ImportError, OSError):  # it may be torch that is broken
            from syncengine.launch import tell_failure

            tell_failure(error, "to import syncengine", in_init=False)
    raise

from syncengine import errors, hooks, lines  # noqa: F401 (lines: as the logger's handler)
from syncengine._C import Communicator, Work
from syncengine._elastic import Elastic, elastic
from syncengine.collectives import all_gather, all_reduce, barrier, broadcast, empty, reduce_scatter
from syncengine.communicator import (
    default_communicator,
    init,
    is_initialized,
    local_rank,
    rank,
    shrink,
    shutdown,
    world_size,
)
from syncengine.parallel import Parallel
from syncengine.parallel.micro_batches import MicroBatches, micro_batches
from syncengine.sharded import ShardedOptimizer
from syncengine.torch_backend import register as _register
from syncengine.tracing.session import trace

if torch.distributed.is_available():
    _register()

try:
    __version__ = importlib.metadata.version("syncengine-torch")
except importlib.metadata.PackageNotFoundError:  # built in place
    __version__ = "unknown"

__all__ = [
    "Communicator",
    "Elastic",
    "MicroBatches",
    "Parallel",
    "ShardedOptimizer",
    "Work",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "default_communicator",
    "elastic",
    "empty",
    "errors",
    "hooks",
    "init",
    "is_initialized",
    "local_rank",
    "micro_batches",
    "rank",
    "reduce_scatter",
    "shrink",
    "shutdown",
    "trace",
    "world_size",
]
