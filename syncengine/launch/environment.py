"""Finds out from environment variables which launcher started this process, and as which rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from syncengine.launch import slurm
from syncengine.launch.variables import number, text


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and this process's rank, from 0."""

    kind: str  # "torchrun", "mpi", "slurm", "torch.distributed", or "single" for one process alone
    rank: int
    world_size: int


def detect(environ: Mapping[str, str]) -> Launch:
    """The launch by the first launcher whose variables are set: torchrun, MPI, Slurm, or one with PMIx alone.

    Does not communicate, but PMIx alone makes it begin MPI. Raises InvalidUsage, naming the variable and its value, if
    a variable of that launcher is missing or contradicts another.
    """
    return (
        _torchrun(environ)
        or _read(environ, "mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        or _hydra(environ)
        # Slurm's variables count only inside a job step: plain python in a batch script is one process.
        or (_read(environ, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") if slurm.in_step(environ) else None)
        or _pmix(environ)
        or Launch("single", 0, 1)
    )


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    launch = _read(environ, "torchrun", "RANK", "WORLD_SIZE")
    if launch is not None and launch.world_size > 1:
        text(environ, "MASTER_ADDR", "torchrun")
        number(environ, "MASTER_PORT", "torchrun", 1, 65535)
    return launch


def _hydra(environ: Mapping[str, str]) -> Launch | None:
    """Launches of MPICH and Intel MPI. Plain srun sets PMI_*, too, but not MPI_LOCALRANKID: Slurm's variables count."""
    if "MPI_LOCALRANKID" not in environ and slurm.in_step(environ):
        return None
    return _read(environ, "mpi", "PMI_RANK", "PMI_SIZE")


def _pmix(environ: Mapping[str, str]) -> Launch | None:
    """Launches of a PMIx launcher that sets nothing but a rank: MPI itself knows the rest."""
    if "PMIX_RANK" not in environ:
        return None
    from syncengine.launch import mpi

    world_size = mpi.world_size(f"PMIX_RANK={environ['PMIX_RANK']}")
    return Launch("mpi", number(environ, "PMIX_RANK", "PMIx", 0, world_size - 1), world_size)


def _read(environ: Mapping[str, str], kind: str, rank: str, size: str) -> Launch | None:
    """A launch from the names of its variables; None if neither is set."""
    if not {rank, size} & environ.keys():
        return None
    world_size = number(environ, size, kind, 1)
    return Launch(kind, number(environ, rank, kind, 0, world_size - 1), world_size)
