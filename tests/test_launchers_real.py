"""One script, really started by each launcher that can run here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "tests" / "launched_script.py")
EXCHANGE = str(ROOT / "tests" / "mpi_exchange_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command, **environ):
    """The script's answers by rank, and the output of a run that must succeed."""
    result = start(command, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(answers, key=lambda answer: answer["rank"])


def start(command, **environ):
    """Runs to the end; the launcher's own variables are no other launcher's leftovers."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def answers(world_size, numerics="rank_order"):
    """What the script must say on every rank."""
    return [
        {"rank": rank, "world_size": world_size, "local_rank": rank, "numerics": numerics, "right": True}
        for rank in range(world_size)
    ]


def mpi(name):
    """(mpirun, python) of the environment that `make .venv-<name>/ready` makes."""
    folder = ROOT / f".venv-{name}" / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(f"no {folder}: run `make .venv-{name}/ready`")
    options = {"openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpich": []}[name]
    return [str(folder / "mpirun"), *options, "-n", "2"], str(folder / "python")


def test_plain_process():
    assert run([sys.executable, SCRIPT, "never"]) == answers(1)


@pytest.mark.parametrize("torch_distributed", ["never", "before", "after"])
def test_torchrun(torch_distributed):
    assert run([*TORCHRUN, SCRIPT, torch_distributed], SYNCENGINE_NUMERICS="ring") == answers(2, "ring")


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun(name):
    mpirun, python = mpi(name)
    assert run([*mpirun, python, SCRIPT, "never"]) == answers(2)


TOLD = "Aborted: rank 1 failed in init: ValueError: the disk is full"
AWAY = "Timeout: rank 1 did not join (did its process call syncengine.init?) within 3 s"


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("told", [[TOLD, TOLD], ["told", "told"]]),
        ("stale", [[AWAY, "[b'new 0', b'new 1']"], ["away", "[b'new 0', b'new 1']"]]),
    ],
)
def test_mpi_exchange(name, case, expected):
    mpirun, python = mpi(name)
    assert [answer["answers"] for answer in run([*mpirun, python, EXCHANGE, case])] == expected


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun_init_after_one_that_failed(name):
    mpirun, python = mpi(name)
    told, own = (answer["answers"] for answer in run([*mpirun, python, EXCHANGE, "init_again"]))
    assert told[0] == f"Aborted: rank 1 failed in init: {own[0]}"
    assert own[0].startswith("InvalidUsage: ")
    assert told[1] == own[1] == "2"


def test_mpi_exchange_with_a_rank_that_takes_nothing():
    """Open MPI, which sends no 64 KiB ahead."""
    mpirun, python = mpi("openmpi")
    (waited, _) = run([*mpirun, python, EXCHANGE, "untaken"])
    assert waited["answers"] == [AWAY, "in time"]


def test_mpi4py_of_another_mpi_is_refused():
    """Open MPI under MPICH's mpirun: each rank is a world of its own. (The other way round MPICH itself aborts.)"""
    mpirun, _ = mpi("mpich")
    _, python = mpi("openmpi")
    # Without shared memory: MPICH's mpirun kills the second rank, and Open MPI would leave its files in /dev/shm.
    result = start([*mpirun, python, SCRIPT, "never"], OMPI_MCA_btl="self")
    assert result.returncode != 0
    assert "mpi4py uses another MPI than the launcher" in result.stderr


def test_ranks_started_by_hand(unused_port):
    """Without a launcher's agent rank 0 serves the store; the user's own env:// group shares its port."""
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused_port), "WORLD_SIZE": "2"}
    command = [
        "bash",
        "-c",
        'RANK=1 "$0" "$1" after & RANK=0 "$0" "$1" after && wait $!',
        sys.executable,
        SCRIPT,
    ]
    assert run(command, **environ) == answers(2)


def test_slurm_variables(unused_port):
    """srun's variables, set by hand: rank 0's address comes from the list of nodes."""
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(unused_port),
    }
    ranks = 'for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r "$0" "$1" never & pids+=($!); done; wait ${pids[@]}'
    assert run(["bash", "-c", ranks, sys.executable, SCRIPT], **environ) == answers(2)


def test_missing_variable_ends_the_script():
    result = start([sys.executable, SCRIPT, "never"], RANK="0")
    assert result.returncode == 1
    assert "InvalidUsage: WORLD_SIZE is missing" in result.stderr
