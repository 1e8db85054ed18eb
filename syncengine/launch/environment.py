"""Finds out from environment variables which launcher started this process, and as which rank.

The innermost launcher wins: torchrun (or the same variables set by hand), then MPI, then Slurm. Within one launcher's
set of variables anything missing or contradictory is an InvalidUsage that names the variable and its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncengine.errors import InvalidUsage
from syncengine.launch import slurm
from syncengine.launch.variables import number, text


@dataclass(frozen=True)
class Launch:
    """How this process was started. Ranks count from 0.

    `kind`: "torchrun", "mpi", "slurm", "torch.distributed" or "single".
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int | None = None  # among the ranks of this host; None: the launcher does not say
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidUsage(
                f"rank {self.rank} is not in a world of {self.world_size}: start every rank by one launcher"
            )


def detect(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` describes; "single" (world size 1) if no launcher's variables are there.

    Does not look at an initialised torch.distributed, and does not communicate.
    """
    for read in (_torchrun, _open_mpi, _hydra, _slurm, _pmix):
        launch = read(environ)
        if launch is not None:
            return launch
    return Launch("single", 0, 1, 0, 1)


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    launch = _read(environ, "torchrun", ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if launch.world_size > 1:
        text(environ, "MASTER_ADDR", "torchrun")
        number(environ, "MASTER_PORT", "torchrun", 1, 65535)
    return launch


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if not set(names[:2]) & environ.keys():
        return None
    return _read(environ, "mpi", names[:2], names[2:])


def _hydra(environ: Mapping[str, str]) -> Launch | None:
    """MPICH and Intel MPI. Plain srun sets PMI_* too, but not MPI_LOCALRANKID: there Slurm's variables say more."""
    if not {"PMI_RANK", "PMI_SIZE"} & environ.keys():
        return None
    if "MPI_LOCALRANKID" not in environ and slurm.in_step(environ):
        return None
    return _read(environ, "mpi", ("PMI_RANK", "PMI_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    """Inside a job step only: plain python in a batch script is one process."""
    if not slurm.in_step(environ):
        return None
    world_size = number(environ, "SLURM_STEP_NUM_TASKS", "slurm", 1)
    if "SLURM_NTASKS" in environ and number(environ, "SLURM_NTASKS", "slurm", 1) != world_size:
        raise InvalidUsage(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']} contradicts SLURM_STEP_NUM_TASKS={world_size}: "
            "start every rank with one srun, and set neither by hand"
        )
    rank = number(environ, "SLURM_PROCID", "slurm", 0, world_size - 1)
    local_world_size = slurm.tasks_on_this_node(environ)
    if local_world_size is None:
        return Launch("slurm", rank, world_size)
    local_rank = number(environ, "SLURM_LOCALID", "slurm", 0, local_world_size - 1)
    return Launch("slurm", rank, world_size, local_rank, local_world_size)


def _pmix(environ: Mapping[str, str]) -> Launch | None:
    """A PMIx launcher that sets nothing but a rank: MPI itself knows the rest."""
    if "PMIX_RANK" not in environ:
        return None
    from syncengine.launch import mpi

    rank = number(environ, "PMIX_RANK", "PMIx")
    return Launch("mpi", rank, mpi.world_size(f"PMIX_RANK={rank}"))


def _read(environ: Mapping[str, str], kind: str, world: tuple[str, ...], local: tuple[str, ...]) -> Launch:
    """A launch from the names of (rank, size) and (local rank, local size); the local two may both be absent."""
    world_size = number(environ, world[1], kind, 1)
    rank = number(environ, world[0], kind, 0, world_size - 1)
    if not set(local) & environ.keys():
        return Launch(kind, rank, world_size)
    local_world_size = number(environ, local[1], kind, 1, world_size)
    return Launch(kind, rank, world_size, number(environ, local[0], kind, 0, local_world_size - 1), local_world_size)
