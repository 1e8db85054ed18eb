"""Makes a communicator from ranks that can exchange bytes."""

import contextlib
import functools
import ipaddress
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from syncengine._build import tag
from syncengine._C import Communicator, LocalBootstrap, build_id, death_notices, solo
from syncengine.config import Config
from syncengine.errors import InvalidUsage, Mismatch, SyncError, name_ranks
from syncengine.launch import Exchange, group_timeout
from syncengine.tracing.session import meet

logger = logging.getLogger("syncengine")


# Communicators that new ones replace. They stay open, since communicators that split() made of them may live on.
given_up: weakref.WeakSet[Communicator] = weakref.WeakSet()

GROUP_TIMEOUT = "the timeout of init_process_group or new_group, or SYNCENGINE_TIMEOUT"
_LATE = 5.0  # seconds that an error may need from host to host


class Connection(NamedTuple):
    """A communicator, and the exchange by which its ranks met."""

    communicator: Communicator
    exchange: Exchange | None  # kept where the ranks are on several hosts

    def has_failed(self) -> bool:
        """Whether the communicator has failed or was closed. A failure on any rank of this host is known here by now.

        If a rank of another host has begun to connect anew because of a failure, this waits for the error, 5 seconds at
        most. Then the communicator fails here, too.
        """
        deadline = time.monotonic() + _LATE
        while True:
            try:
                self.communicator.check_peers()
            except SyncError:
                given_up.add(self.communicator)
                self.communicator.close_devices()
                return True
            if self.exchange is None or not self.exchange.superseded():
                return False
            if time.monotonic() > deadline:
                self.communicator.abort("another rank has given up this communicator, and connects anew")
            time.sleep(0.001)


_has_met = False


def has_met_others() -> bool:
    """Whether this process, or one that it was forked from, has ever had connections to other ranks."""
    return _has_met


def connect(
    exchange: Exchange | None,
    rank: int,
    size: int,
    config: Config,
    timeout: float,
    global_ranks: list[int] | None = None,
    lost: Callable[[], str] | None = None,
    timeout_call: str = "",
) -> Connection:
    """Connects the ranks that `exchange` reaches (None: this rank alone).

    Messages call them by `global_ranks`; None is for all ranks of the job, which connect one communicator at a time.
    `lost` is called now and then, and returns why some ranks will not come, or "". If this rank fails, the others get
    its error. Errors advise a longer timeout by `timeout_call`, the name of what sets it; "" stands for the calls that
    make a process group if the timeout is a group's, else for init.
    """
    options = config.options(timeout)
    of_group = config.timeout is None and group_timeout() is not None
    options.timeout_call = timeout_call or (GROUP_TIMEOUT if of_group else "init(timeout=...)")
    if exchange is None:
        if global_ranks is None:
            meet(0, 1, 0, config.trace, whole=True)
        return Connection(solo(options, 0 if global_ranks is None else global_ranks[0]), None)
    global _has_met
    _has_met = True
    try:
        # This rank listens before the others know its address: if it dies, they see their connections to it break.
        known_as = list(range(size)) if global_ranks is None else global_ranks
        bootstrap = LocalBootstrap(rank, size, options, known_as)
        names, addresses, unmarked = _agree(exchange, config, bootstrap.address(), known_as)
        hosts = bootstrap.hosts(addresses)
        network = transport = None
        level = logging.INFO if rank == 0 else logging.DEBUG
        if max(hosts) > 0:
            each = ", ".join(f"{names[hosts.index(host)]}: {hosts.count(host)}" for host in range(max(hosts) + 1))
            met = f"{len(hosts)} ranks on {max(hosts) + 1} hosts ({each})"
            note = ": sums per host, so bits depend on which ranks share one" if config.numerics == "fast" else ""
            logger.log(level, "%s; interhost=%s; numerics=%s%s", met, config.interhost, config.numerics, note)
            if config.interhost == "tcp":
                network = _listen(exchange, config, bootstrap, addresses)
            elif config.interhost == "mpi":
                from syncengine.interhost.mpi import open_mpi

                transport = open_mpi(rank, known_as, config.checksum, exchange)
            else:
                from syncengine.interhost.torch import open_torch

                in_order = global_ranks is None  # the default communicator
                transport = open_torch(rank, known_as, in_order, config.checksum, config.silence, exchange)

        def why_lost() -> str:
            if max(hosts) > 0:  # the processes of one host are watched without it
                exchange.check()
            return lost() if lost is not None else ""

        communicator = bootstrap.connect(addresses, timeout, network, transport, why_lost)
        if unmarked and (unseen := unmarked.intersection(bootstrap.unseen(addresses))):
            _warn_once(
                f"rank {known_as[rank]}: the kernel or a sandbox refuses both ways to notice the death of "
                f"{name_ranks(unseen)} before the deadline: allow set_robust_list or pidfd_open (seccomp), run a "
                "machine's ranks in one PID namespace, and use no emulator that lacks both"
            )
        meet(known_as[rank], max(known_as) + 1, hosts[rank], config.trace, whole=global_ranks is None)
        if communicator.links:
            logger.log(level, "between hosts: %s", communicator.links)
        return Connection(communicator, exchange if max(hosts) > 0 else None)
    except BaseException as error:
        exchange.fail(error)  # otherwise the others wait
        raise


def _agree(
    exchange: Exchange, config: Config, address: bytes, known_as: list[int]
) -> tuple[list[str], list[bytes], set[int]]:
    """Compares builds and shared settings. Returns hosts, addresses, and ranks whose deaths no robust futex shows."""
    head: dict[str, Any] = {
        "build": build_id,
        "settings": config.shared(),
        "host": socket.gethostname(),
        "torch": torch.__version__,
    }
    with contextlib.suppress(RuntimeError):  # as where no thread can be started for the probe
        head["marks"] = "robust futexes" in death_notices()
    mine = json.dumps(head).encode() + b"\n" + address
    answers = exchange(mine)
    heads, _, addresses = zip(*(answer.partition(b"\n") for answer in answers), strict=True)
    everyone = [json.loads(head) for head in heads]
    for peer, other in zip(known_as, everyone, strict=True):
        theirs = other.get("build", "an older one")
        if theirs != build_id:
            raise Mismatch(
                f"rank {peer} on {other['host']} runs another build of syncengine ({theirs}) than rank "
                f"{known_as[answers.index(mine)]} ({build_id}): install the same one on all hosts"
            )
        if answers[0] == mine and tag(other["torch"]) != tag(torch.__version__):
            _warn_once(
                f"rank {known_as[0]} has torch {torch.__version__}, rank {peer} on {other['host']} has "
                f"{other['torch']}: their gradients may differ; install the same minor release on all hosts"
            )
    for name, first in everyone[0]["settings"].items():
        for peer, other in zip(known_as, everyone, strict=True):
            if (value := other["settings"][name]) != first:
                raise Mismatch(
                    f"rank {known_as[0]} has {name}={first!r}, rank {peer} has {name}={value!r}: give all ranks the "
                    "same"
                )
    unmarked = {rank for rank, other in zip(known_as, everyone, strict=True) if not other.get("marks", True)}
    return [other["host"] for other in everyone], list(addresses), unmarked


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _listen(exchange: Exchange, config: Config, bootstrap: LocalBootstrap, addresses: list[bytes]) -> list[bytes]:
    """Listens for the ranks of other hosts. Returns the addresses at which all ranks listen."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not interface and not config.interface and not bootstrap.on_one_network(addresses):
        interface = reachable_address(os.environ)
    return exchange(bootstrap.listen(config.network(interface)))


def reachable_address(environ: Mapping[str, str]) -> str:
    """This machine's address on the route to MASTER_ADDR, or else the address of its own name; never a loopback one."""
    for host in filter(None, (environ.get("MASTER_ADDR"), socket.gethostname())):
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing
                address: str = probe.getsockname()[0]
                if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                    return address
    raise InvalidUsage(
        "there are several hosts, and this one knows itself only by a loopback address: name the network interface "
        "that the others reach it by, in init(interface=...) or SYNCENGINE_INTERFACE (as in GLOO_SOCKET_IFNAME), or "
        "set MASTER_ADDR to an address of rank 0's host which the others reach"
    )
