"""Decides, for the patch, whether ``syncengine.Parallel`` serves a ``DistributedDataParallel``, alike on every rank.

Imports syncengine only inside ``choose``: if its extension can't be loaded, that is a reason for staying with DDP. Each
rank has a reason or none. Ranks exchange reasons through the group's store, and so choose the same class.
"""

import contextlib
import inspect
import sys
import time
from typing import Any

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel

import syncengine_autoload
from syncengine_autoload import VARIABLE, tell
from syncengine_autoload.rendezvous import Failed, Rendezvous

# The backends whose ranks are processes that have a store in common.
_BACKENDS = {"gloo", "nccl", "ucc", "xccl", "syncengine"}

_told: set[str] = set()


def choose(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], caller: str) -> type | None:
    """``Parallel`` if it serves ``cls(*args, **kwargs)``, where ``cls`` is DDP or a subclass of it; else None.

    ``caller`` is the module that calls it. Collective over the model's process group, as DDP's construction is.
    """
    if cls is not DistributedDataParallel:
        if "syncengine" not in {base.__module__.partition(".")[0] for base in cls.__mro__}:
            what = f"{cls.__qualname__}: it is a subclass of DistributedDataParallel"
            _tell_once(dist.get_rank() if dist.is_initialized() else 0, what)
        return None
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
    except TypeError:
        return None  # DDP raises it
    group = _group_of(bound.arguments)
    if group is None or not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        return None  # DDP raises an error
    reason = _static_reason(group, caller)
    parallel: type | None = None
    if reason is None:
        parallel, reason = _parallel_for(args, kwargs, dist.get_world_size(group))
        reason = _first_reason(group, reason)
    if reason is not None or parallel is None:
        kind = type(bound.arguments["module"]).__name__
        _tell_once(dist.get_rank(group), f"the DistributedDataParallel of a {kind}, which stays torch's: {reason}")
        return None
    if dist.get_rank(group) == 0 and "" not in _told:
        _told.add("")
        ranks = f"{dist.get_world_size(group)} ranks, backend {dist.get_backend(group)}"
        tell(f"DistributedDataParallel is syncengine.Parallel, since {VARIABLE}=1 ({ranks})")
    return parallel


def _group_of(arguments: dict[str, Any]) -> Any:
    """The process group that these arguments of DDP mean; None where DDP raises an error."""
    if arguments.get("process_group") is not None:
        return None if arguments.get("device_mesh") is not None else arguments["process_group"]
    if arguments.get("device_mesh") is not None:
        with contextlib.suppress(Exception):
            return arguments["device_mesh"].get_group(mesh_dim=0)
        return None
    return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None


def _static_reason(group: dist.ProcessGroup, caller: str) -> str | None:
    """The reason why DDP must serve a model, if that is the same on all ranks without an exchange."""
    if caller.startswith("torch.distributed._composable"):
        return "torch's replicate() is built on its parts"
    names = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    if strange := sorted(names - _BACKENDS):
        return f"its process group's backend is {', '.join(strange)}, over which syncengine can't find the other ranks"
    return None


def _parallel_for(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> tuple[type | None, str | None]:
    """``Parallel``, or None if it can't be imported; and the reason why this rank can't use it, if there is one."""
    syncengine_autoload.tells_itself = True
    try:
        from syncengine.parallel import Parallel
        from syncengine.patch import give_to_ddp, refusal
    except Exception as error:
        return None, f"syncengine can't be imported: {type(error).__name__}: {error}"
    return Parallel, refusal(args, kwargs, ranks) or give_to_ddp()


def _first_reason(group: dist.ProcessGroup, own: str | None) -> str | None:
    """The reason of the first rank of the group that has one.

    Raises TimeoutError naming ranks that do not come; RuntimeError if another rank has failed, or was interrupted.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.distributed_c10d._world.pg_map[group][1]
    ranks = dist.get_process_group_ranks(group)
    meeting = Rendezvous(store, "patch", rank, ranks)
    try:
        _wait_for(meeting, (own or "").encode(), ranks)
    except Failed as failed:
        meeting.stay_until_heard(to_come=True)
        raise syncengine_autoload.HeardError(failed.notice.decode()) from None
    except BaseException as error:
        meeting.fail(f"rank {dist.get_rank()}: {type(error).__name__}: {error}".encode())
        raise
    reasons = [meeting.values[peer].decode() for peer in range(size)]
    said = [f"rank {peer}: {reason}" if reason != own else reason for peer, reason in enumerate(reasons) if reason]
    return said[0] if said else None


def _wait_for(meeting: Rendezvous, reason: bytes, global_ranks: list[int], log_after: float = 5.0) -> None:
    """Waits until each rank has given its reason, by polling: the store's own wait is deaf to Ctrl-C."""
    store: Any = meeting.store  # its type does not tell of its timeout
    start, pause, told = time.monotonic(), 0.0005, False
    while not meeting.gather(reason):
        waited = time.monotonic() - start
        _raise_if_ended(meeting, global_ranks)
        names = ", ".join(str(global_ranks[peer]) for peer in sorted(meeting.missing()))
        text = f"ranks {names} did not wrap a model in DistributedDataParallel, as this rank does"
        if waited > store.timeout.total_seconds():
            raise TimeoutError(f"{text}, within {waited:.0f} s: all ranks of the group must, with {VARIABLE}=1")
        if waited > log_after and not told:
            told = True
            tell(f"waiting since {waited:.0f} s: {text}; do they have {VARIABLE}=1, too?")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _raise_if_ended(meeting: Rendezvous, global_ranks: list[int]) -> None:
    there = meeting.there()
    if dead := [global_ranks[peer] for peer, lives in there.items() if not lives]:
        raise RuntimeError(f"rank {dead[0]} died before all had wrapped a model in DistributedDataParallel")
    if (arrivals := sys.modules.get("syncengine.launch.arrivals")) is not None:
        arrivals.raise_if_ended({number for peer, number in enumerate(global_ranks) if peer not in there})


def _tell_once(rank: int, what: str) -> None:
    if rank == 0 and what not in _told:
        _told.add(what)
        tell(f"{VARIABLE}=1 has no effect on {what}")
