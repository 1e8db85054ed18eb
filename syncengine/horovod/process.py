"""Which process this is: init and shutdown, ranks, and what there is to run on."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import torch

import syncengine.communicator as engine
from syncengine._C import has_cuda
from syncengine.errors import InvalidUsage
from syncengine.horovod.calls import Calls
from syncengine.horovod.handles import forget_handles
from syncengine.horovod.streams import Stream
from syncengine.launch import find_launch

_calls: Calls | None = None
_optimizers: list[Stream] = []  # of every DistributedOptimizer, in the order in which all ranks have made them


def init(comm: object = None, process_sets: object = None) -> None:
    """Connects all ranks of this launch, as `syncengine.init` does; collective. Without a launcher there is one rank.

    Called again it does nothing, or, if the communicator has failed, connects anew; an optimizer made before that must
    be made anew. Settings are those of `syncengine.init`, from its variables or from a call before this one.
    """
    global _calls
    for name, value in (("comm", comm), ("process_sets", process_sets)):
        if value is not None:
            raise InvalidUsage(
                f"hvd.init({name}=...) is not supported: all ranks of the launch take part; for some of them use "
                "syncengine.default_communicator().split(ranks)"
            )
    if find_launch().world_size == 1 and os.environ.get("HOROVOD_SIZE", "1") != "1":
        raise InvalidUsage(
            f"horovodrun has started this process as one of {os.environ['HOROVOD_SIZE']} (HOROVOD_SIZE), each of which "
            "would be alone: start the ranks by torchrun, mpirun or srun"
        )
    communicator = engine.init()
    if _calls is None or _calls.communicator is not communicator:
        forget_handles()
        _optimizers.clear()
        _calls = Calls(communicator)


def shutdown() -> None:
    """Disconnects in good order. Does nothing before init(); runs automatically when the process ends."""
    global _calls
    forget_handles()
    _optimizers.clear()
    _calls = None
    engine.shutdown()


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() not since."""
    return _calls is not None and engine.is_initialized() and engine.default_communicator() is _calls.communicator


def calls() -> Calls:
    """The stream of this module's collectives. Raises InvalidUsage before init()."""
    if _calls is None or not is_initialized():
        raise InvalidUsage("Horovod has not been initialized: call hvd.init() first")
    return _calls


def add_optimizer(stream: Stream) -> None:
    """Another stream that join() has to serve."""
    _optimizers.append(stream)


def optimizers() -> list[Stream]:
    """The streams of DistributedOptimizers since init(), but for those that were closed."""
    return _optimizers


def close_unneeded_optimizers() -> None:
    """Closes the streams that no rank needs any more: a rank alone can't know when that is. Collective."""
    if not _optimizers:
        return
    needed = torch.tensor([stream.needed for stream in _optimizers], dtype=torch.uint8, device="cpu")
    calls().communicator.all_reduce(needed, "max")
    for stream, still in zip(list(_optimizers), needed.tolist(), strict=True):
        if not still:
            _optimizers.remove(stream)
            stream.close()


def rank() -> int:
    """This process's rank, from 0. This and all below raise InvalidUsage before init()."""
    return calls().rank


def size() -> int:
    """The number of ranks."""
    return calls().size


def local_rank() -> int:
    """This process's rank among those of its host, from 0."""
    calls()
    return engine.local_rank()


def local_size() -> int:
    """The number of ranks on this host."""
    me = rank()
    return engine.hosts().count(engine.hosts()[me])


def cross_rank() -> int:
    """Among the hosts that have a rank with this local rank: this host's number, from 0."""
    me = rank()
    return _hosts_with(local_rank()).index(engine.hosts()[me])


def cross_size() -> int:
    """How many hosts have a rank with this local rank."""
    calls()
    return len(_hosts_with(local_rank()))


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    calls()
    return len(set(Counter(engine.hosts()).values())) == 1


def _hosts_with(local: int) -> list[str]:
    return [host for host, ranks in Counter(engine.hosts()).items() if ranks > local]


def mpi_built() -> bool:
    """Whether ranks can be started by mpirun: whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether these ranks were started by mpirun."""
    calls()
    return engine.launcher() == "mpi"


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from any thread here. Raises InvalidUsage if these ranks were not started by mpirun."""
    if not mpi_enabled():
        raise InvalidUsage("mpi_threads_supported() is about MPI, but these ranks were not started by mpirun")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def cuda_built() -> bool:
    """Whether the engine has its CUDA side, and torch has CUDA."""
    return has_cuda and torch.version.cuda is not None


def nccl_built() -> int:
    """0: collectives are the engine's own."""
    return 0


def gloo_built() -> bool:
    """False: collectives are the engine's own."""
    return False


def gloo_enabled() -> bool:
    """False: collectives are the engine's own."""
    return False


def ccl_built() -> bool:
    """False: collectives are the engine's own."""
    return False


def ddl_built() -> bool:
    """False: collectives are the engine's own."""
    return False


def rocm_built() -> bool:
    """False: there is no side for ROCm."""
    return False
