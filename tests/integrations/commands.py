"""Commands that tests start as a user would."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from ports import unused_ports

GLOO_ABORTED = "terminate called without an active exception"
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: object, home: Path, timeout: float = 300) -> str:
    """What a command says, which must succeed; it finds its home in `home`. Under SYNCENGINE_PATCH=1 it must say so."""
    settings = {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "MASTER_PORT": str(unused_ports()[0]),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=home,
        env=os.environ | settings,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    told = "DistributedDataParallel is syncengine.Parallel, since" in finished.stdout + finished.stderr
    assert told == (os.environ.get("SYNCENGINE_PATCH") == "1")
    return finished.stdout


def torchrun(example: str | Path, *arguments: object, home: Path, ranks: int = 2) -> str:
    """One of examples/, or the script at an absolute path."""
    at = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *at)
    return run(*launcher, ROOT / "examples" / example, *arguments, home=home)


def over_gloo(start: Callable[..., str], *arguments: object, home: Path) -> str:
    """run() or torchrun() of what uses Gloo, begun anew if that aborted a process.

    One of its threads may still hold a tensor as the process ends, and drops it without an interpreter: seen in 2 of 44
    runs on a busy machine (https://github.com/pytorch/pytorch/issues/190489).
    """
    for _ in range(2):
        try:
            return start(*arguments, home=home)
        except AssertionError as error:
            if GLOO_ABORTED not in str(error):
                raise
    return start(*arguments, home=home)


def load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


@contextlib.contextmanager
def imported(example: str) -> Iterator[ModuleType]:
    """One of examples/ as a module; meanwhile there is one thread, as its ranks have it."""
    file = ROOT / "examples" / example
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield module
    finally:
        torch.set_num_threads(threads)
