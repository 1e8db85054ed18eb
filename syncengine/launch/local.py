"""Ranks on this machine, for commands of syncengine that were started without a launcher."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from syncengine.errors import InvalidUsage
from syncengine.launch.environment import Launch

_SERVED_WITHIN = timedelta(seconds=20)
_STORE, _STORE_OF_RANK = 16, 4  # file descriptors: the store's own, and of each rank's connections to it


def run_local_ranks(count: int, arguments: Sequence[str], threads: int) -> int:
    """Runs this same command, with `arguments`, as `count` ranks of `threads` threads each, unless OMP_NUM_THREADS is
    set; returns the exit code of the first rank that has another than 0. A signal that ends this process ends them.
    Raises InvalidUsage if ranks can't meet on this machine.
    """
    _check_descriptors(count)
    _check_loopback()
    store = _serve_store()
    common = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: this process serves the store
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        for rank in range(count):
            environ = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([*_this_command(), *arguments], env=environ))
        codes = [rank.wait() for rank in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.terminate()
                process.wait()
        signal.signal(signal.SIGTERM, previous)
    failed = [code for code in codes if code != 0]
    return 0 if not failed else failed[0] if failed[0] > 0 else 128 - failed[0]  # as shells: 128 + the signal


def check_ranks(count: int | None, launch: Launch) -> None:
    """Raises InvalidUsage where a launcher has started another number of ranks than --ranks says."""
    if count is not None and launch.kind != "single" and launch.world_size != count:
        ranks = f"{launch.world_size} rank{'' if launch.world_size == 1 else 's'}"
        raise InvalidUsage(f"--ranks {count}, but {launch.kind} has started {ranks}: leave --ranks out")


def _check_descriptors(count: int) -> None:
    """Raises InvalidUsage where ranks would wait in vain for a store that can't accept them."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _STORE + _STORE_OF_RANK * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InvalidUsage(f"ulimit -n is {limit}, and starting {count} ranks takes {needed}: raise ulimit -n to 1024")


def _check_loopback() -> None:
    """Raises InvalidUsage if 127.0.0.1 can't be reached: torch would try for minutes, with a stack trace for each."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "raise ulimit -n" if error.errno == errno.EMFILE else "bring it up (ip link set lo up)"
        raise InvalidUsage(f"the loopback interface, 127.0.0.1, can't be reached ({error}): {remedy}") from error


def _serve_store() -> dist.TCPStore:
    try:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_SERVED_WITHIN)
    except dist.DistError as error:
        raise InvalidUsage(
            f"no store can be served at 127.0.0.1 ({str(error).splitlines()[0]}): start the ranks by torchrun instead"
        ) from error


def _this_command() -> list[str]:
    """`python -m syncengine`, or the script that pip made of it."""
    script = Path(sys.argv[0])
    return [sys.executable, *(["-m", "syncengine"] if script.name in ("__main__.py", "-m") else [str(script)])]


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
