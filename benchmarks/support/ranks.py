"""Starts the ranks of a benchmark, and joins them to each other."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import syncengine

REPOSITORY = Path(__file__).parents[2]
LAUNCHERS = ("torchrun", "openmpi", "mpich")


def run_ranks(module: str, ranks: int, launcher: str, arguments: list[str]) -> int:
    """Runs `python -m module arguments` as `ranks` processes of one thread each; returns the exit status."""
    command = [*launch_command(launcher, ranks), "-m", module, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if launcher == "openmpi" and os.geteuid() == 0:  # as in containers; mpirun asks for both
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(command, check=False, cwd=REPOSITORY, env=environment).returncode


def launch_command(launcher: str, ranks: int) -> list[str]:
    """The command up to and including the interpreter; an MPI comes from its own environment, `.venv-openmpi` say."""
    if launcher == "torchrun":
        alone = ["--standalone", "--local-addr=127.0.0.1"]  # else it asks for the name of this machine
        return [sys.executable, "-m", "torch.distributed.run", *alone, f"--nproc-per-node={ranks}"]
    programs = Path(os.environ.get(f"BENCHMARK_{launcher.upper()}", REPOSITORY / f".venv-{launcher}")) / "bin"
    if not (programs / "mpirun").exists():
        sys.exit(
            f"no {programs}/mpirun: `make {programs.parent.name}/ready` installs that MPI into its own environment"
        )
    # Ranks are bound to no core, as under torchrun, so that the launcher makes no difference to the other peers.
    placement = ["--bind-to", "none", "--oversubscribe"] if launcher == "openmpi" else ["-bind-to", "none"]
    return [str(programs / "mpirun"), "-n", str(ranks), *placement, str(programs / "python")]


def join(launcher: str) -> tuple[int, int]:
    """(rank, size); initializes torch.distributed over Gloo, and MPI where it launched us."""
    torch.set_num_threads(1)
    if launcher == "torchrun":
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    store = (
        dist.TCPStore("127.0.0.1", 0, world.size, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    )
    port = world.bcast(store.port if store else None)
    store = store or dist.TCPStore("127.0.0.1", port, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return world.rank, world.size


def leave() -> None:
    """Disconnects all ranks together, behind the last measurement."""
    dist.barrier()
    syncengine.shutdown()
    dist.destroy_process_group()


def slowest(seconds: torch.Tensor) -> torch.Tensor:
    """Each element's maximum over the ranks."""
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def everywhere(condition: bool) -> bool:
    """Whether `condition` holds on all ranks."""
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
