"""Scripts for Horovod, on this engine: `import syncengine.horovod as hvd` in place of `import horovod.torch as hvd`.

The interface is that of horovod.torch 0.28; docs/horovod.md compares them call by call.
"""

import sys as _sys
from types import ModuleType as _Module

from syncengine.errors import InvalidUsage as _InvalidUsage
from syncengine.horovod.allreduce import allreduce as allreduce
from syncengine.horovod.allreduce import allreduce_ as allreduce_
from syncengine.horovod.allreduce import allreduce_async as allreduce_async
from syncengine.horovod.allreduce import allreduce_async_ as allreduce_async_
from syncengine.horovod.allreduce import grouped_allreduce as grouped_allreduce
from syncengine.horovod.allreduce import grouped_allreduce_ as grouped_allreduce_
from syncengine.horovod.allreduce import grouped_allreduce_async as grouped_allreduce_async
from syncengine.horovod.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from syncengine.horovod.collective import poll as poll
from syncengine.horovod.collective import synchronize as synchronize
from syncengine.horovod.elastic import HorovodInternalError as HorovodInternalError
from syncengine.horovod.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from syncengine.horovod.gather import allgather as allgather
from syncengine.horovod.gather import allgather_async as allgather_async
from syncengine.horovod.gather import alltoall as alltoall
from syncengine.horovod.gather import alltoall_async as alltoall_async
from syncengine.horovod.gather import barrier as barrier
from syncengine.horovod.gather import grouped_allgather as grouped_allgather
from syncengine.horovod.gather import grouped_allgather_async as grouped_allgather_async
from syncengine.horovod.gather import grouped_reducescatter as grouped_reducescatter
from syncengine.horovod.gather import grouped_reducescatter_async as grouped_reducescatter_async
from syncengine.horovod.gather import reducescatter as reducescatter
from syncengine.horovod.gather import reducescatter_async as reducescatter_async
from syncengine.horovod.gather import sparse_allreduce_async as sparse_allreduce_async
from syncengine.horovod.join import join as join
from syncengine.horovod.objects import allgather_object as allgather_object
from syncengine.horovod.objects import broadcast as broadcast
from syncengine.horovod.objects import broadcast_ as broadcast_
from syncengine.horovod.objects import broadcast_async as broadcast_async
from syncengine.horovod.objects import broadcast_async_ as broadcast_async_
from syncengine.horovod.objects import broadcast_object as broadcast_object
from syncengine.horovod.objects import broadcast_object_fn as broadcast_object_fn
from syncengine.horovod.objects import broadcast_optimizer_state as broadcast_optimizer_state
from syncengine.horovod.objects import broadcast_parameters as broadcast_parameters
from syncengine.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from syncengine.horovod.process import ccl_built as ccl_built
from syncengine.horovod.process import cross_rank as cross_rank
from syncengine.horovod.process import cross_size as cross_size
from syncengine.horovod.process import cuda_built as cuda_built
from syncengine.horovod.process import ddl_built as ddl_built
from syncengine.horovod.process import gloo_built as gloo_built
from syncengine.horovod.process import gloo_enabled as gloo_enabled
from syncengine.horovod.process import init as init
from syncengine.horovod.process import is_homogeneous as is_homogeneous
from syncengine.horovod.process import is_initialized as is_initialized
from syncengine.horovod.process import local_rank as local_rank
from syncengine.horovod.process import local_size as local_size
from syncengine.horovod.process import mpi_built as mpi_built
from syncengine.horovod.process import mpi_enabled as mpi_enabled
from syncengine.horovod.process import mpi_threads_supported as mpi_threads_supported
from syncengine.horovod.process import nccl_built as nccl_built
from syncengine.horovod.process import rank as rank
from syncengine.horovod.process import rocm_built as rocm_built
from syncengine.horovod.process import shutdown as shutdown
from syncengine.horovod.process import size as size
from syncengine.horovod.process import start_timeline as start_timeline
from syncengine.horovod.process import stop_timeline as stop_timeline
from syncengine.horovod.process_sets import ProcessSet as ProcessSet
from syncengine.horovod.process_sets import add_process_set as add_process_set
from syncengine.horovod.process_sets import global_process_set as global_process_set
from syncengine.horovod.process_sets import remove_process_set as remove_process_set
from syncengine.horovod.reductions import Average as Average
from syncengine.horovod.reductions import Compression as Compression
from syncengine.horovod.reductions import Max as Max
from syncengine.horovod.reductions import Min as Min
from syncengine.horovod.reductions import Product as Product
from syncengine.horovod.reductions import Sum as Sum
from syncengine.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

# Names of horovod.torch that this interface refuses, each with the advice that its error gives.
_ADASUM = "use op=hvd.Average or op=hvd.Sum"
_NOTHING = "there is nothing to check: importing syncengine says so if it is not built"
_REFUSED = {
    "Adasum": _ADASUM,
    "num_rank_is_power_2": f"it is for Adasum: {_ADASUM}",
    "run": "start the script with torchrun, mpirun or srun",
    "gpu_available": "ask torch.cuda.is_available()",
    "mpi_lib_v2": "what it has for scripts is in syncengine.horovod itself (hvd.allreduce, ...)",
    "check_extension": _NOTHING,
    "check_installed_version": _NOTHING,
}

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)]


# Scripts import from Horovod's modules `functions` and `mpi_ops`, too: here both are this module.
functions = mpi_ops = _sys.modules[__name__]
_sys.modules.update({f"{__name__}.functions": functions, f"{__name__}.mpi_ops": mpi_ops})


def __getattr__(name: str) -> _Module:
    if name in _REFUSED:
        raise _InvalidUsage(f"{__name__} has no {name}: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
