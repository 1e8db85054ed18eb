"""Ranks on this machine, for commands of syncengine that were started without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def run_local_ranks(count: int, arguments: Sequence[str], threads: int) -> int:
    """Runs this same command, with `arguments`, as `count` ranks of `threads` threads each, unless OMP_NUM_THREADS is
    set; returns the exit code of the first rank that has another than 0. A signal that ends this process ends them.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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


def _this_command() -> list[str]:
    """`python -m syncengine`, or the script that pip made of it."""
    script = Path(sys.argv[0])
    return [sys.executable, *(["-m", "syncengine"] if script.name in ("__main__.py", "-m") else [str(script)])]


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
