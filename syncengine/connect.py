"""From ranks that can exchange bytes to ranks with a communicator."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
from collections.abc import Mapping

from syncengine._C import Communicator, LocalBootstrap, solo
from syncengine.config import Config
from syncengine.errors import InvalidUsage, Mismatch
from syncengine.interhost import open_mover
from syncengine.launch import Exchange

logger = logging.getLogger("syncengine")


def connect(
    exchange: Exchange | None,
    rank: int,
    size: int,
    config: Config,
    timeout: float,
    global_ranks: list[int] | None = None,
) -> tuple[Communicator, list[str]]:
    """The communicator of the ranks that `exchange` reaches (None: of this one alone), and each one's host.

    `global_ranks` are what messages call them; their ranks in the exchange if None. What keeps this rank away is told
    to the others.
    """
    options = config.options(timeout)
    if exchange is None:
        return solo(options), [""]
    try:
        # Listens before it is heard of: a rank that dies after its first sign of life breaks connections.
        bootstrap = LocalBootstrap(rank, size, options)
        names, addresses = _agree(exchange, config, bootstrap.address())
        hosts = bootstrap.hosts(addresses)
        network = mover = None
        if max(hosts) > 0:
            _log_hosts(rank, config, hosts, names)
            if config.interhost == "tcp":
                network = _meet(exchange, config, bootstrap, addresses)
            else:
                known_as = list(range(size)) if global_ranks is None else global_ranks
                mover = open_mover(config.interhost, rank, known_as, config.checksum, exchange)
        communicator = bootstrap.connect(addresses, timeout, global_ranks, network, mover)
        if communicator.links:
            logger.log(logging.INFO if rank == 0 else logging.DEBUG, "between hosts: %s", communicator.links)
        return communicator, [f"{host} {name}" for host, name in zip(hosts, names, strict=True)]
    except BaseException as error:
        exchange.fail(error)  # else the others wait
        raise


def _agree(exchange: Exchange, config: Config, address: bytes) -> tuple[list[str], list[bytes]]:
    """Checks that all ranks have the settings that must be equal; returns each rank's host name and address."""
    own = config.shared()
    answers = exchange(json.dumps({"settings": own, "host": socket.gethostname()}).encode() + b"\n" + address)
    heads, _, addresses = zip(*(answer.partition(b"\n") for answer in answers), strict=True)
    everyone = [json.loads(head) for head in heads]
    for name in own:
        for peer, other in enumerate(everyone):
            first, value = everyone[0]["settings"][name], other["settings"][name]
            if value != first:
                raise Mismatch(
                    f"rank 0 has {name}={first!r}, rank {peer} has {name}={value!r}: give all ranks the same"
                )
    return [other["host"] for other in everyone], list(addresses)


def _meet(exchange: Exchange, config: Config, bootstrap: LocalBootstrap, addresses: list[bytes]) -> list[bytes]:
    """Listens for the ranks of other hosts; returns where each rank does."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not interface and not config.interface and not bootstrap.on_one_network(addresses):
        interface = _reachable_address(os.environ)
    return exchange(bootstrap.listen(config.network(interface)))


def _log_hosts(rank: int, config: Config, hosts: list[int], names: list[str]) -> None:
    logger.log(
        logging.INFO if rank == 0 else logging.DEBUG,
        "%d ranks on %d hosts (%s); interhost=%s; numerics=%s%s",
        len(hosts),
        max(hosts) + 1,
        ", ".join(f"{names[hosts.index(host)]}: {hosts.count(host)}" for host in range(max(hosts) + 1)),
        config.interhost,
        config.numerics,
        ": sums per host, so bits depend on which ranks share one" if config.numerics == "fast" else "",
    )


def _reachable_address(environ: Mapping[str, str]) -> str:
    """This machine's address on the way to the rank where all meet, or that of its own name."""
    for host in (environ.get("MASTER_ADDR"), socket.gethostname()):
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing
                address = probe.getsockname()[0]
                if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                    return address
    raise InvalidUsage(
        "there are several hosts, and this one knows itself only by a loopback address: name the network interface "
        "that the others reach it by, in init(interface=...) or SYNCENGINE_INTERFACE (as in GLOO_SOCKET_IFNAME)"
    )
