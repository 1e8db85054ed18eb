"""Runs the command `syncengine` as users do: alone, and by hand, one environment for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from repository import ROOT

_FOREIGN = ("OMPI_", "PMI", "SLURM_", "SYNCENGINE_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")

Result = subprocess.CompletedProcess


def environ_of(**given: str) -> dict[str, str]:
    """Ours, without what launchers and settings have left in it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return clean | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **given}


def syncengine(
    *arguments: str, environ: dict[str, str] | None = None, prefix: Sequence[str] = (), **options: Any
) -> Result:
    """`python -m syncengine ...`, to its end. `prefix`: the program that starts it."""
    command = [*prefix, sys.executable, "-m", "syncengine", *arguments]
    return subprocess.run(
        command, env=environ_of(**(environ or {})), capture_output=True, text=True, timeout=240, check=False, **options
    )


def by_hand(
    environs: Sequence[dict[str, str]], port: int, *arguments: str, world: int | None = None, **options: Any
) -> list[Result]:
    """Ranks without a launcher, each with an environment of its own."""
    ranks = []
    for rank, environ in enumerate(environs):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world or len(environs)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        folder = environ.get("PYTHONPATH", str(ROOT))
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "syncengine", *arguments],
                env=environ_of(**place | environ),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **options,
            )
        )
    results = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        results.append(Result(process.args, process.returncode, out, err))
    return results
