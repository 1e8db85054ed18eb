"""Runs the command `syncengine` as users do, and in processes that have torch imported (programs.py)."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pool import RankPool
from programs import Result, run_programs
from repository import ROOT

_FOREIGN = ("OMPI_", "PMI", "SLURM_", "SYNCENGINE_", "TORCHELASTIC_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def environ_of(**given: str) -> dict[str, str]:
    """Ours, without what launchers and settings have left in it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return clean | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **given}


def syncengine(*arguments: str, environ: dict[str, str] | None = None, **options: Any) -> Result:
    """`python -m syncengine ...`, to its end."""
    command = [sys.executable, "-m", "syncengine", *arguments]
    return subprocess.run(
        command, env=environ_of(**(environ or {})), capture_output=True, text=True, timeout=600, check=False, **options
    )


def ranks_by_hand(environs: Sequence[dict[str, str]], port: int) -> list[dict[str, str]]:
    """Environments of ranks without a launcher, each with its own part."""
    common = {"WORLD_SIZE": str(len(environs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [environ_of(**common, RANK=str(rank)) | environ for rank, environ in enumerate(environs)]


def slurm_variables(world: int, port: int) -> list[dict[str, str]]:
    """What srun gives to each of so many ranks on this host."""
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    return [common | {"SLURM_PROCID": str(rank)} for rank in range(world)]


def by_hand(programs: RankPool, environs: Sequence[dict[str, str]], port: int, *arguments: str) -> list[Result]:
    """On such ranks."""
    return run_programs(programs, ["-m", "syncengine", *arguments], ranks_by_hand(environs, port))


def alone(
    programs: RankPool,
    *arguments: str,
    environ: dict[str, str] | None = None,
    prepare: Callable[[int], None] | None = None,
) -> Result:
    """In one process without a launcher."""
    command = ["-m", "syncengine", *arguments]
    (result,) = run_programs(programs, command, [environ_of(**(environ or {}))], prepare=prepare)
    return result
