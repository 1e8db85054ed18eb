"""init and shutdown, this process's rank, the queries of what ranks can run on, and the timeline."""

import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import syncengine.communicator as engine
from syncengine._C import Communicator, has_cuda
from syncengine.errors import InvalidUsage
from syncengine.horovod.collective import forget_handles
from syncengine.horovod.process_sets import ProcessSet, add_process_set, calls, connect, forget, global_process_set
from syncengine.launch import find_launch
from syncengine.launch.local import INSTEAD
from syncengine.tracing.session import begin, end


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Connects all ranks of this launch, as `syncengine.init` does; without a launcher there is one rank.

    All ranks call it. A second call does nothing, or, if the communicator has failed, connects anew; an optimizer or
    process set made before that must be made anew. `process_sets`, the same on all ranks, are added; sets may be added
    later, too, so "dynamic" is not needed. Settings come from environment variables SYNCENGINE_*, or from an earlier
    call of `syncengine.init`.
    """
    if comm is not None:
        raise InvalidUsage(
            "hvd.init(comm=...) is not supported: all ranks of the launch take part; for some of them use "
            "hvd.add_process_set(ranks)"
        )
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise InvalidUsage(f'hvd.init(process_sets={process_sets!r}) is not allowed: give lists of ranks, or "dynamic"')
    if find_launch().world_size == 1 and os.environ.get("HOROVOD_SIZE", "1") != "1":
        raise InvalidUsage(
            f"horovodrun has started this process as one of {os.environ['HOROVOD_SIZE']} (HOROVOD_SIZE), each of which "
            "would be alone: start the ranks by torchrun, mpirun or srun"
        )
    if follow(engine.init()):
        for each in process_sets or () if not isinstance(process_sets, str) else ():
            add_process_set(each)


def follow(communicator: Communicator) -> bool:
    """Makes all later calls use `communicator`. Returns False if they do so already. All ranks call it."""
    stream = global_process_set._stream
    if stream is not None and stream.communicator is communicator:
        return False
    forget_handles()
    connect(communicator)
    path = os.environ.pop("HOROVOD_TIMELINE", "")  # once: init() may be called again
    if path and path != "DYNAMIC":  # which is for start_timeline() later
        start_timeline(path)
    return True


def shutdown() -> None:
    """Disconnects in good order. Does nothing before init(). It runs by itself when the process ends."""
    forget_handles()
    forget()
    engine.shutdown()


def is_initialized() -> bool:
    """Whether init() has been called, and no shutdown() since."""
    stream = global_process_set._stream
    return stream is not None and engine.is_initialized() and engine.default_communicator() is stream.communicator


def rank() -> int:
    """This process's rank, from 0. Like all queries about ranks here, it raises InvalidUsage before init().

    A process that `syncengine run --restart` has started may not have been let in yet by the others. Then this function
    and `local_rank` return the rank that it replaces, and `size` and `local_size` the number of ranks at the start.
    """
    return calls().rank if (place := _coming()) is None else place[0]


def size() -> int:
    """The number of ranks."""
    return calls().size if (place := _coming()) is None else place[1]


def local_rank() -> int:
    """This process's rank among those of its host, from 0."""
    return engine.local_rank() if (place := _coming()) is None else place[0]


def local_size() -> int:
    """The number of ranks on this host."""
    hosts = calls().communicator.hosts
    return hosts.count(hosts[calls().rank]) if (place := _coming()) is None else place[1]


def _coming() -> tuple[int, int] | None:
    """The rank that this process replaces, and the number of ranks; None if it replaces none, or once it was let in."""
    if calls().communicator.global_ranks != [0] or INSTEAD not in os.environ:
        return None
    place, count = os.environ[INSTEAD].split("/")
    return int(place), int(count)


def cross_rank() -> int:
    """This host's number, from 0, among the hosts that have a rank with this local rank."""
    mine = calls().communicator.hosts[calls().rank]
    return _hosts_with(local_rank()).index(mine) if _coming() is None else 0


def cross_size() -> int:
    """How many hosts have a rank with this local rank."""
    return len(_hosts_with(local_rank())) if _coming() is None else 1


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return len(set(Counter(calls().communicator.hosts).values())) == 1


def _hosts_with(local: int) -> list[int]:
    return [host for host, ranks in Counter(calls().communicator.hosts).items() if ranks > local]


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


def _not_there() -> bool:
    """Returns False: the engine uses none of NCCL, Gloo, oneCCL, DDL and ROCm."""
    return False


nccl_built = gloo_built = gloo_enabled = ccl_built = ddl_built = rocm_built = _not_there


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records what happens on this rank, until `stop_timeline` or the process's end; call it on every rank.

    Each rank writes to the folder `file_path`.rings; the last rank that stops makes `file_path` of it, by the package
    perfetto. Raises InvalidUsage before init(), if there is a timeline already, if it can't be written, and for
    `mark_cycles`.
    """
    if mark_cycles:
        raise InvalidUsage("start_timeline(mark_cycles=True): this engine has no cycles; leave it out")
    begin(f"{os.fspath(file_path)}.rings", merged=Path(file_path))


def stop_timeline() -> None:
    """Ends this rank's part of the timeline. Does nothing without one."""
    end()
