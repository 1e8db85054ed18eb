"""Reads Slurm's variables, besides the rank: the step, and the host on which rank 0 runs."""

import re
from collections.abc import Mapping

from syncengine.errors import InvalidUsage
from syncengine.launch.variables import number, text

# Step ids of a batch script's and an interactive shell's own processes (slurm.h): no tasks of a parallel step.
_NOT_PARALLEL = {"4294967291", "4294967290"}

_FIRST_PORT, _PORTS = 10000, 20000  # below the ports that Linux hands out by itself


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of a step's tasks."""
    return "SLURM_STEP_NUM_TASKS" in environ and environ.get("SLURM_STEP_ID") not in _NOT_PARALLEL


def master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where rank 0 listens: MASTER_ADDR and MASTER_PORT, each derived from the job where it isn't set."""
    host = environ.get("MASTER_ADDR") or first_host(environ)
    if environ.get("MASTER_PORT"):
        return host, number(environ, "MASTER_PORT", "slurm", 1, 65535)
    # Steps of one job, and neighbouring jobs on a shared node, get ports of their own.
    step = number(environ, "SLURM_STEP_ID", "slurm") if "SLURM_STEP_ID" in environ else 0
    return host, _FIRST_PORT + (number(environ, "SLURM_JOB_ID", "slurm") * 7 + step) % _PORTS


def first_host(environ: Mapping[str, str]) -> str:
    """The first host of a list such as "gpu[03-05,9],login1"."""
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_NODELIST"
    hosts = text(environ, name, "slurm")
    match = re.match(r"([\w.-]+)(?:\[(\d+)(?:-\d+)?(?:,[^\]]*)?\]([\w.-]*))?(?:,|$)", hosts, re.ASCII)
    if match is None:
        raise InvalidUsage(f"{name}={hosts!r} can't be read as a list of hosts: set MASTER_ADDR to rank 0's host")
    return match[1] + (match[2] or "") + (match[3] or "")
