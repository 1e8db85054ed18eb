"""Finds out from environment variables which launcher started this process, and as which rank.

The first of these launchers counts whose variables are there: torchrun (or the same variables set by hand), MPI, Slurm.
Within one launcher's variables anything missing or contradictory is an InvalidUsage that names the variable and its
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncengine.launch import slurm
from syncengine.launch.variables import number, text


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and this process's rank, from 0.

    `kind`: "torchrun", "mpi", "slurm", "torch.distributed" or "single".
    """

    kind: str
    rank: int
    world_size: int


def detect(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` describes; "single" (world size 1) if no launcher's variables are there.

    Does not look at an initialised torch.distributed, and does not communicate.
    """
    for read in (_torchrun, _open_mpi, _hydra, _slurm_step, _pmix):
        launch = read(environ)
        if launch is not None:
            return launch
    return Launch("single", 0, 1)


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    launch = _read(environ, "torchrun", "RANK", "WORLD_SIZE")
    if launch.world_size > 1:
        text(environ, "MASTER_ADDR", "torchrun")
        number(environ, "MASTER_PORT", "torchrun", 1, 65535)
    return launch


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} & environ.keys():
        return None
    return _read(environ, "mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def _hydra(environ: Mapping[str, str]) -> Launch | None:
    """Launches of MPICH and Intel MPI.

    Plain srun sets PMI_*, too, but not MPI_LOCALRANKID; Slurm's variables say more.
    """
    if not {"PMI_RANK", "PMI_SIZE"} & environ.keys():
        return None
    if "MPI_LOCALRANKID" not in environ and slurm.in_step(environ):
        return None
    return _read(environ, "mpi", "PMI_RANK", "PMI_SIZE")


def _slurm_step(environ: Mapping[str, str]) -> Launch | None:
    """Launches of srun, inside a job step only: plain python in a batch script is one process."""
    if not slurm.in_step(environ):
        return None
    return _read(environ, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _pmix(environ: Mapping[str, str]) -> Launch | None:
    """Launches of a PMIx launcher that sets nothing but a rank: MPI itself knows the rest."""
    if "PMIX_RANK" not in environ:
        return None
    from syncengine.launch import mpi

    world_size = mpi.world_size(f"PMIX_RANK={environ['PMIX_RANK']}")
    return Launch("mpi", number(environ, "PMIX_RANK", "PMIx", 0, world_size - 1), world_size)


def _read(environ: Mapping[str, str], kind: str, rank: str, size: str) -> Launch:
    """A launch from the names of its variables."""
    world_size = number(environ, size, kind, 1)
    return Launch(kind, number(environ, rank, kind, 0, world_size - 1), world_size)
