"""TCP ports for the stores of tests, which bind them some time after they were found to be free."""

import contextlib
import random
import socket

# Below those that the kernel gives to whoever asks for any, which Gloo and others do all the time.
_OURS = range(20_000, 32_000)


def unused_ports(count: int = 1) -> list[int]:
    """So many, chosen by chance: other test runs take some, too."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_OURS, len(_OURS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} ports in {_OURS} are free")
