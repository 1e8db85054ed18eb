"""The default communicator: makes it, replaces it after a failure, and closes it at the end."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from syncengine._C import Communicator, announce_end, backend_communicators, end_backends, end_packet_transports
from syncengine.config import DEFAULT_TIMEOUT, Config, Numerics
from syncengine.connect import Connection, connect, given_up, has_met_others
from syncengine.errors import InvalidUsage, PeerLost, SyncError, blamed_rank, name_ranks
from syncengine.groups import (
    all_group_communicators,
    backend_communicator,
    communicator_of,
    existing_communicator,
    forget_groups,
)
from syncengine.launch import (
    Exchange,
    Launch,
    arrivals,
    find_launch,
    group_timeout,
    open_exchange,
    tell_failure,
)
from syncengine.launch.local import say_connected
from syncengine.process_end import (
    at_end,
    let_cause_end_first,
    tell_peers,
    tell_peers_of_errors,
    tell_ranks_to_come,
    what_ends,
)
from syncengine.torch_group import destroy_torch_group, ensure_torch_group, users_group


class _Default(NamedTuple):
    connection: Connection
    config: Config
    launch: Launch
    group: weakref.ReferenceType[dist.ProcessGroup] | None  # torch's default one, if the ranks are those of it

    @property
    def communicator(self) -> Communicator:
        return self.connection.communicator


_default: _Default | None = None
_successors: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # by shrink()
_has_tried = False  # to connect: from then on init() tells the others itself what it fails by
_lock = threading.RLock()  # a signal handler may call shutdown() in the middle of init()
_owner: int | None = None  # the process that may use all this, and none that is forked from it


def refuse_forked_child() -> None:
    """Records the process that calls this first. In its forked children, raises InvalidUsage if it had connections."""
    global _owner, _default, _has_tried
    _owner = _owner or os.getpid()
    if _owner == os.getpid():
        return
    if has_met_others() or backend_communicators():
        raise InvalidUsage(
            "syncengine can't be used in a forked child (a DataLoader worker, say) of a process that called "
            "syncengine.init(): start such processes before init(), or by spawn"
        )
    _owner, _default, _has_tried = os.getpid(), None, False
    forget_groups()
    given_up.clear()


def _is_owner() -> bool:
    return _owner == os.getpid()


def init(
    numerics: Numerics | None = None,
    timeout: float | timedelta | None = None,
    arena_bytes: int | None = None,
    log_after: float | None = None,
    gradient_memory: str | None = None,
    interhost: str | None = None,
    interface: str | None = None,
    sockets: int | None = None,
    checksum: bool | None = None,
    silence: float | None = None,
    summary: bool | None = None,
    torch_group: bool = False,
) -> Communicator:
    """Connects all ranks of this launch and returns the default communicator.

    Every rank calls it. A second call returns the same communicator; a setting that is given then must have the same
    value. If that communicator has failed, all ranks that call init() again, whether they have noticed the failure or
    not, get a new one, with the settings of the old one where none are given; models and tensors of the old one stay
    with it. If torch.distributed's default group, by which ranks met, was replaced, the new group's ranks get one, too.
    A setting that is None comes from the variable SYNCENGINE_<NAME>, otherwise it is the default:

    - `numerics` ("rank_order"): order of summation: "rank_order", "ring" for the bits of torch's DDP over Gloo, or
      "fast": sums per host first. Over hosts with several ranks its bits depend on who shares a host, and on buckets.
    - `timeout`: seconds (or a timedelta) that anything may wait for other ranks; by default the timeout of an
      initialised torch.distributed, else 1800.
    - `arena_bytes`: upper limit of the memory for `empty`, gradients and staging on this rank; by default as much as
      the machine has. Allocated when used.
    - `log_after` (5): seconds of waiting after which one line says for which ranks and for what.
    - `gradient_memory` ("arena"): where Parallel's large gradients lie: "arena", where peers reduce them in place, or
      "torch", wherever torch puts them; they are staged then. Never changes the bits.
    - `summary` (True): whether rank 0 logs one line when a program that used Parallel ends: the number of
      steps, how long one takes, and how much of that is synchronization.

    If the ranks are on several hosts, which `init` detects:

    - `interhost` ("tcp"): what connects the hosts: "tcp", "mpi" (mpi4py, under mpirun) or "torch" (an initialized
      torch.distributed whose backend moves CPU tensors). Changes no bits.
    - `interface` (tcp only): where this rank listens: a name ("eth0"), names or prefixes ("eth,ib", "^docker,lo"), or
      an address. By default GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else the address from which this host reaches
      MASTER_ADDR.
    - `sockets` (4; tcp only): connections between two ranks.
    - `checksum` (False): check all data by CRC-32C, in addition to the transport's own checksum.
    - `silence` (30; not mpi): seconds without a heartbeat after which a rank of another host is lost. It takes that
      long only if a host or network fails or freezes: the end of a process is detected at once. A line is logged after
      2 s of silence.

    `torch_group`: also make torch.distributed's default process group of these ranks, backend "syncengine", for code
    that asks torch.distributed for ranks (samplers, metrics, other tools); shutdown() destroys it. A group that is
    there already is kept, and left alone by shutdown(). Neither Parallel nor init() without this argument makes a
    group.

    The secret by which ranks authenticate each other comes from SYNCENGINE_SECRET or SYNCENGINE_SECRET_FILE only.

    Raises InvalidUsage (bad setting or launch variable), Mismatch (ranks with other settings), Timeout (naming the
    ranks that did not come), PeerLost and Aborted (a rank ended or failed meanwhile).
    """
    given = {name: value for name, value in locals().items() if name != "torch_group"}
    global _default
    with _lock:
        refuse_forked_child()
        if _default is None:
            _default = _connect_default(None, None, given)
            install_hooks()
        elif is_replaced():  # known to this rank alone, perhaps: so only the new group's ranks are asked
            old, _default = _default, _connect_default(None, _default.config, given)
            given_up.add(old.communicator)
        elif _default.connection.has_failed():
            if _default.communicator.size < _default.launch.world_size:
                raise InvalidUsage(
                    "the default communicator has failed, and other ranks of this launch have been lost before: call "
                    "syncengine.shrink() again, on all ranks that are left"
                )
            if _default.group is not None and users_group() is None:
                raise InvalidUsage(
                    "the default communicator has failed, and the process group by which its ranks met has been "
                    "destroyed: call torch.distributed.init_process_group again, or begin anew by syncengine.shutdown()"
                )
            _default = _connect_default(_default.launch, _default.config, given)
        else:
            _check_unchanged(_default, given)
        if torch_group:
            ensure_torch_group(_default.communicator, _default.launch, _default.config.log_after)
        return _default.communicator


def group_communicator(group: dist.ProcessGroup) -> Communicator:
    """The communicator of a torch.distributed process group. All ranks of the group call it.

    1. A group whose backend is syncengine has the communicator of its backend, unless that has failed.
    2. torch's default group has the default communicator, which is initialized if need be.
    3. Any other group has a communicator of its own, with the settings of init() or of the environment, even if it has
       the same ranks: the calls of two groups need not come in the same order.

    Raises InvalidUsage if the default group has the default communicator's ranks in another order.
    """
    communicator = backend_communicator(group)
    if communicator is not None and not Connection(communicator, None).has_failed():
        return communicator
    refuse_forked_child()
    if communicator is None and _shares_default(group):
        return init()
    current = _default  # without _lock, which init() holds while it waits for other ranks, who may wait for this group
    communicator = communicator_of(group, None if current is None else current.config)
    install_hooks()
    return communicator


def _shares_default(group: dist.ProcessGroup) -> bool:
    """Whether the default communicator, or the one that init() would make, is the communicator of `group`."""
    if group is not dist.distributed_c10d._get_default_group():
        return False
    current = _default
    if current is None or current.group is not None:
        return True
    ours, theirs = current.communicator, dist.get_rank(group)
    if ours.size == dist.get_world_size(group) and ours.rank != theirs:
        raise InvalidUsage(
            f"rank {theirs} of the process group is rank {ours.rank} of the default communicator: call "
            "init_process_group before syncengine.init(), which then takes its ranks"
        )
    return ours.size == dist.get_world_size(group)


def shrink(communicator: Communicator | None = None, patience: float = 30.0) -> Communicator:
    """Makes a communicator of the ranks that are left after a failure, in their order.

    It takes the default communicator's place if that one is shrunk. All ranks that are left call it; they need not have
    noticed the failure. `communicator`: None for the default one; a second call for the same communicator returns the
    same result. Ranks that have not called this after `patience` seconds, because they are stopped, are left out.
    Models move by `Parallel.shrink()`.

    Raises Aborted on a rank that was left out. Over several hosts it raises PeerLost on ranks that are too few to go on
    without those that can't be reached (docs/elastic.md), and InvalidUsage where tcp does not connect them.
    """
    global _default
    with _lock:
        refuse_forked_child()
        before = default_communicator() if communicator is None else communicator
        if (known := _successors.get(before)) is not None:
            return known
        after = before.shrink(patience)
        if after is not before:
            _successors[before] = after
        current = _default
        if current is not None and current.communicator is before:
            _default = current._replace(connection=Connection(after, None))
        return after


def connect_beside(exchange: Exchange, rank: int, global_ranks: list[int], lost: Callable[[], str]) -> Connection:
    """Connects `global_ranks`, which all call it, beside the default communicator, with its settings. See connect()."""
    current = _current()
    timeout = current.config.timeout or group_timeout() or DEFAULT_TIMEOUT
    return connect(exchange, rank, len(global_ranks), current.config, timeout, global_ranks, lost)


def replace_default(connection: Connection) -> None:
    """Makes the connection's communicator the default one. The old one, of some of its ranks, is closed."""
    global _default
    with _lock:
        before = _current()
        _successors[before.communicator] = connection.communicator
        _default = before._replace(connection=connection)
        before.communicator.close()


def shutdown() -> None:
    """Disconnects in good order; a rank that still waits for this one gets PeerLost. Does nothing without init().

    Destroys torch.distributed's default group if init(torch_group=True) made it, with the groups made from it.

    It runs by itself when the process ends.
    """
    global _default
    with _lock, contextlib.ExitStack() as closing:  # each of these runs, though one before it raises, or Ctrl-C comes
        current, _default = _default, None
        if not _is_owner():
            forget_groups()
            return
        if current is not None:
            closing.callback(current.communicator.close)
        closing.callback(_close_groups)
        closing.callback(destroy_torch_group)


def _close_groups() -> None:
    with contextlib.ExitStack() as closing:
        for communicator in [*all_group_communicators(), *given_up]:
            closing.callback(communicator.close)
        forget_groups()


def is_initialized() -> bool:
    """Whether init() has been called, and no shutdown() since."""
    return _default is not None


def is_replaced() -> bool:
    """Whether the next init() will make another default communicator, for torch.distributed's new default group."""
    current, group = _default, users_group()
    return current is not None and current.group is not None and group is not None and current.group() is not group


def default_communicator() -> Communicator:
    """The communicator that init() made last, or that of torch.distributed's default group, if that is syncengine's.

    Raises InvalidUsage if there is neither.
    """
    group = users_group() if _default is None else None
    if group is not None and (communicator := backend_communicator(group)) is not None:
        return communicator
    return _current().communicator


def wants_summary() -> bool:
    """The setting `summary`, of init(), or of the environment if init() was not called."""
    current = _default
    return (Config.read(os.environ) if current is None else current.config).summary


def rank() -> int:
    """This process's rank, from 0. Raises InvalidUsage without a default communicator."""
    return default_communicator().rank


def world_size() -> int:
    """The number of ranks. Raises InvalidUsage without a default communicator."""
    return default_communicator().size


def local_rank() -> int:
    """This process's rank among those of its host, from 0. Raises InvalidUsage before init()."""
    communicator = _current().communicator
    hosts, me = communicator.hosts, communicator.rank
    return hosts[:me].count(hosts[me])


def launcher() -> str:
    """The launcher of the ranks, as `Launch.kind` names it. Raises InvalidUsage before init()."""
    return _current().launch.kind


def _current() -> _Default:
    current = _default
    if current is None:
        raise InvalidUsage("there is no default communicator: call syncengine.init() first")
    return current


def _connect_default(launch: Launch | None, before: Config | None, given: dict[str, Any]) -> _Default:
    """Connects all ranks. A setting that is not `given` is that of `before`, or, if that is None, the environment's."""
    global _has_tried
    _has_tried = True
    try:
        launch = launch or find_launch()
        config = Config.read(os.environ, **given) if before is None else replace(before, **Config.parsed(given))
    except BaseException as error:
        tell_failure(error, "in init", in_init=True)
        raise
    timeout = config.timeout or group_timeout() or DEFAULT_TIMEOUT
    exchange = None if launch.world_size == 1 else open_exchange(launch, timeout, config.log_after)
    connection = connect(exchange, launch.rank, launch.world_size, config, timeout)
    if launch.rank == 0:
        say_connected()
    group = users_group() if launch.kind == "torch.distributed" else None
    return _Default(connection, config, launch, None if group is None else weakref.ref(group))


def _check_unchanged(current: _Default, given: dict[str, Any]) -> None:
    has = replace(current.config, timeout=current.config.timeout or current.communicator.timeout)
    for name, wanted in Config.parsed(given).items():
        if wanted != getattr(has, name):
            raise InvalidUsage(
                f"init({name}={wanted!r}), but the default communicator already has {name}={getattr(has, name)!r}: "
                "call init with all settings first of all, or shutdown() before"
            )


def _end() -> None:
    error, communicators = what_ends(), _made_here()
    if error is not None:
        tell_peers(error, communicators)
    announce_end()
    shutdown()
    if _is_owner():
        end_backends()  # torch leaves groups that nobody destroyed as they are
        end_packet_transports()  # while there is still an interpreter, and MPI
    let_cause_end_first(error, [each for each in communicators if error is not None or each not in given_up])


def install_hooks() -> None:
    """Installs, once, the functions that run when this process ends, normally or by an uncaught error."""
    at_end(_end)
    tell_peers_of_errors(_made_here)


tell_ranks_to_come(lambda: _has_tried)


def _raise_if_ended(ranks: Collection[int]) -> None:
    """Raises the error by which one of these ranks of the job has ended, if a communicator knows that one has ended."""
    for communicator in _of_this_job():
        with contextlib.suppress(SyncError):
            communicator.check_peers()
        if ended := set(communicator.ended()).intersection(ranks):
            failure = communicator.exception()
            if failure is not None and blamed_rank(failure) in ended:
                raise failure
            raise PeerLost(f"{name_ranks(ended)} died or exited, and all ranks must come: see its own output")


arrivals.knows_ended = _raise_if_ended


def _of_this_job() -> list[Communicator]:
    """The open communicators whose `global_ranks` are as init() would number the ranks now; a forked child has none."""
    current, group = _default, users_group()
    if not _is_owner():
        return []
    groups = [] if group is None else list(dist.distributed_c10d._world.pg_map)
    found = [existing_communicator(each) for each in groups]
    if current is not None and (current.group is None or (group is not None and current.group() is group)):
        whole = current.launch.rank, current.launch.world_size
        if group is not None and whole != (dist.get_rank(group), dist.get_world_size(group)):
            return []  # the launcher numbers them in one way, and the user's group in another
        found.append(current.communicator)
    return [communicator for communicator in found if communicator is not None]


def _made_here() -> list[Communicator]:
    """All communicators of this process, those below backends included. A forked child has none."""
    if not _is_owner():
        return []
    current = _default
    own = [] if current is None else [current.communicator]
    return [*all_group_communicators(), *given_up, *backend_communicators(), *own]
