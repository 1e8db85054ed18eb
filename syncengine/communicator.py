"""The default communicator: how it comes to be, how it ends, and the collectives on it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncengine._C import Communicator, Work, backend_communicators, end_backends, end_movers
from syncengine.config import DEFAULT_TIMEOUT, Config
from syncengine.connect import connect
from syncengine.errors import InvalidUsage
from syncengine.groups import (
    all_group_communicators,
    backend_communicator,
    communicator_of,
    forget_groups,
)
from syncengine.launch import Launch, find_launch, group_timeout, open_exchange, with_local_ranks


class _Default(NamedTuple):
    communicator: Communicator
    config: Config
    launch: Launch
    pid: int  # a forked child inherits this object, but the communicator is its parent's


_default: _Default | None = None
_owner: int | None = None  # the process that called init() first
_lock = threading.RLock()  # a signal handler may call shutdown() in the middle of init()


def init(
    algorithm: str | None = None,
    numerics: str | None = None,
    timeout: float | timedelta | None = None,
    arena_bytes: int | None = None,
    log_after: float | None = None,
    gradient_memory: str | None = None,
    interhost: str | None = None,
    host_algorithm: str | None = None,
    interface: str | None = None,
    sockets: int | None = None,
    checksum: bool | None = None,
) -> Communicator:
    """Connects all ranks of this launch and returns the default communicator.

    Collective: every rank calls it. Called again it returns the same communicator; a setting given then must be as it
    is. What is None comes from the variable SYNCENGINE_<NAME>, else from the default:

    - `algorithm` ("auto"): how bytes move, never the bits of a result: "auto", "direct", "staged", "one_shot", "ring".
    - `numerics` ("rank_order"): order of summation: "rank_order", "ring" for the bits of torch's DDP over Gloo, or
      "fast": sums per host first, so that the bits depend on which ranks share one.
    - `timeout`: seconds (or a timedelta) that anything may wait for other ranks; the timeout of an initialised
      torch.distributed, else 1800.
    - `arena_bytes`: most memory for `empty`, gradients and staging on this rank; as much as the machine has. Taken when
      used.
    - `log_after` (5): seconds of waiting after which one line says for whom and for what.
    - `gradient_memory` ("arena"): where Parallel's large gradients lie: "arena", where peers reduce them in place, or
      "torch", wherever torch puts them; they are staged then. Never changes the bits.

    Where the ranks are on several hosts, which is found out by itself:

    - `interhost` ("tcp"): what connects the hosts: "tcp", "mpi" (mpi4py, under mpirun) or "torch" (an initialized
      torch.distributed whose backend moves CPU tensors; CUDA tensors go by its NCCL, if it has that). Changes no bits
      but those of "fast" by NCCL.
    - `host_algorithm` ("auto"): how bytes go between them: "exchange" (directly), "chain" (from host to host where that
      is possible), or, measured here, whichever is quicker. Never changes the bits of "rank_order".
    - `interface` (tcp only): where this rank listens: a name ("eth0"), names or prefixes ("eth,ib", "^docker,lo"), or
      an address. By default GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else the address from which this host reaches
      MASTER_ADDR.
    - `sockets` (4; tcp only): connections between two ranks.
    - `checksum` (False): check all data by CRC-32C, beside the transport's own sum.

    The secret that ranks prove to know when they connect comes from SYNCENGINE_SECRET or SYNCENGINE_SECRET_FILE alone.

    Raises InvalidUsage (bad setting or launch variable), Mismatch (ranks with other settings), Timeout (naming the
    ranks that did not come), PeerLost and Aborted (a rank ended or failed meanwhile).
    """
    global _default
    given = {
        "algorithm": algorithm,
        "numerics": numerics,
        "timeout": timeout,
        "arena_bytes": arena_bytes,
        "log_after": log_after,
        "gradient_memory": gradient_memory,
        "interhost": interhost,
        "host_algorithm": host_algorithm,
        "interface": interface,
        "sockets": sockets,
        "checksum": checksum,
    }
    with _lock:
        refuse_forked_child()
        if _default is None:
            config = Config.read(os.environ, **given)
            communicator, launch = _connect(find_launch(), config)
            _default = _Default(communicator, config, launch, os.getpid())
            install_hooks()
        else:
            _check_unchanged(_default.config, given)
        return _default.communicator


def group_communicator(group: dist.ProcessGroup) -> Communicator:
    """The communicator of a torch.distributed process group: the one below it, if its backend is syncengine; else the
    default one, initialized if need be, if it has all ranks; else one of its own, with the settings of init() or of the
    environment. Collective over the group.
    """
    communicator = backend_communicator(group)
    if communicator is not None:
        return communicator
    if dist.get_process_group_ranks(group) == list(range(dist.get_world_size())):
        return init()
    with _lock:
        refuse_forked_child()
        config = _default.config if _default is not None else Config.read(os.environ)
        communicator = communicator_of(group, config)
        install_hooks()
        return communicator


def refuse_forked_child() -> None:
    """Remembers the first process that comes here; its forked children, which hold its connections, may not."""
    global _owner
    if _owner is None:
        _owner = os.getpid()
    elif _owner != os.getpid():
        raise InvalidUsage(
            "syncengine can't be used in a forked child (a DataLoader worker, say) of a process that called "
            "syncengine.init(): start such processes before init(), or by spawn"
        )


def shutdown() -> None:
    """Leaves in good order; a rank that still waits for this one gets PeerLost. Nothing happens without init().

    Runs by itself when the process ends.
    """
    global _default
    with _lock:
        current, _default = _default, None
        groups = all_group_communicators() if _owner == os.getpid() else []
        forget_groups()
        if current is not None and current.pid == os.getpid():
            groups.append(current.communicator)
        for communicator in groups:
            communicator.close()


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() not since."""
    return _default is not None


def default_communicator() -> Communicator:
    """The communicator that init() made. Raises InvalidUsage without one."""
    if _default is None:
        raise InvalidUsage("there is no default communicator: call syncengine.init() first")
    return _default.communicator


def rank() -> int:
    """This process's rank, from 0. Raises InvalidUsage before init()."""
    return default_communicator().rank


def world_size() -> int:
    """The number of ranks. Raises InvalidUsage before init()."""
    return default_communicator().size


def local_rank() -> int:
    """This process's rank among those of its host, from 0. Raises InvalidUsage before init()."""
    default_communicator()
    return _default.launch.local_rank


def all_reduce(tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work | None:
    """Replaces `tensor` (any shape and strides) on every rank by the reduction over all ranks.

    `op`: "sum", "avg" (floating dtypes), "product", "min", "max". Shape, dtype and `op` must be the same on all ranks.
    Returns a Work to wait on if `async_op`, else waits. Raises InvalidUsage, Mismatch, Timeout, PeerLost, Aborted.
    """
    return default_communicator().all_reduce(tensor, op, async_op)


def broadcast(tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
    """Copies rank `src`'s `tensor` into that of every rank. Else as `all_reduce`."""
    return default_communicator().broadcast(tensor, src, async_op)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work | None:
    """Reduces `input` over all ranks; rank r gets the r-th of world_size equal parts of it in `output`.

    `input` has world_size times as many elements as `output`. Else as `all_reduce`.
    """
    return default_communicator().reduce_scatter(output, input, op, async_op)


def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
    """Puts every rank's `input`, in rank order, into `output` on every rank.

    `output` has world_size times as many elements as `input`. Else as `all_reduce`.
    """
    return default_communicator().all_gather(output, input, async_op)


def barrier(async_op: bool = False, device: torch.device | str | None = None) -> Work | None:
    """Returns once every rank has called it; with a CUDA `device`, its current stream waits instead. Else as
    `all_reduce`.
    """
    return default_communicator().barrier(async_op, None if device is None else torch.device(device))


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """An uninitialized tensor in memory that the other ranks of this host can read: collectives on it copy nothing.

    `size` as for torch.empty; `dtype` None is torch's default dtype; `device` is a CPU or a
    CUDA device; on the latter this is a collective call: all ranks make the same tensors in the same order.
    """
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise InvalidUsage(f"device={str(device)!r} is not allowed: give a CPU or a CUDA device")
    sizes = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    where = None if device is None else torch.device(device)
    return default_communicator().empty(list(sizes), dtype or torch.get_default_dtype(), where)


def _connect(launch: Launch, config: Config) -> tuple[Communicator, Launch]:
    timeout = config.timeout or group_timeout() or DEFAULT_TIMEOUT
    exchange = None if launch.world_size == 1 else open_exchange(launch, timeout, config.log_after)
    communicator, hosts = connect(exchange, launch.rank, launch.world_size, config, timeout)
    return communicator, with_local_ranks(launch, hosts)


def _check_unchanged(config: Config, given: dict[str, Any]) -> None:
    changed = Config.read({}, **given)
    for name, value in given.items():
        is_now, wanted = getattr(config, name), getattr(changed, name)
        if value is not None and wanted != is_now:
            raise InvalidUsage(
                f"init({name}={wanted!r}), but the default communicator already has {name}={is_now!r}: "
                "call init with all settings first of all, or shutdown() before"
            )


def _end() -> None:
    shutdown()
    if _owner == os.getpid():
        end_backends()  # torch leaves groups that nobody destroyed as they are
        end_movers()  # while there is still an interpreter, and MPI


_hooks_installed = False


def install_hooks() -> None:
    """Once: what happens when this process ends, by itself or by an uncaught error."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_end)
    previous = sys.excepthook

    def tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An uncaught error ends this process: the others shall raise its text now, not wait."""
        current = _default
        communicators = [*all_group_communicators(), *backend_communicators()] if _owner == os.getpid() else []
        if current is not None and current.pid == os.getpid():
            communicators.append(current.communicator)
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        for communicator in communicators:
            communicator.abort(f"rank {communicator.global_ranks[communicator.rank]}: {text}")
        previous(kind, error, trace)

    sys.excepthook = tell_peers
