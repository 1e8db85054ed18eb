"""Scripts for Horovod, on this engine: `import syncengine.horovod as hvd` in place of `import horovod.torch as hvd`.

The interface is that of horovod.torch 0.28; docs/horovod.md compares them call by call.
"""

from importlib import import_module
from types import ModuleType

from syncengine.errors import SyncError as HorovodInternalError
from syncengine.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from syncengine.horovod.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from syncengine.horovod.compression import Compression
from syncengine.horovod.gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from syncengine.horovod.handles import poll, synchronize
from syncengine.horovod.join import join
from syncengine.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from syncengine.horovod.optimizer import DistributedOptimizer
from syncengine.horovod.process import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from syncengine.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from syncengine.horovod.reductions import Average, Max, Min, Product, Sum
from syncengine.horovod.refusal import refuse as _refuse
from syncengine.horovod.scatter import (
    barrier,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from syncengine.horovod.sync_batch_norm import SyncBatchNorm


def __getattr__(name: str) -> ModuleType:
    if name in ("functions", "mpi_ops"):  # they import from here
        return import_module(f"{__name__}.{name}")
    return _refuse(name)


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
