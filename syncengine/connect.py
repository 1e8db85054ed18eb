"""From ranks that can exchange bytes to ranks with a communicator."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from syncengine._C import Communicator, LocalBootstrap, solo
from syncengine.config import Config
from syncengine.errors import Mismatch
from syncengine.launch import Exchange


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
        hosts, addresses = _agree(exchange, config, bootstrap.address())
        return bootstrap.connect(addresses, timeout, global_ranks), hosts
    except BaseException as error:
        exchange.fail(error)  # else the others wait
        raise


def _agree(exchange: Exchange, config: Config, address: bytes) -> tuple[list[str], list[bytes]]:
    """Checks that all ranks have the settings that must be equal; returns each rank's host and address."""
    own = {"algorithm": config.algorithm, "numerics": config.numerics}
    answers = exchange(json.dumps({"settings": own, "host": _host()}).encode() + b"\n" + address)
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


def _host() -> str:
    """The same on two ranks only if they share a kernel."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
