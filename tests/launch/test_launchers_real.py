"""One script, really started by each launcher that can run here."""

import json
import os
import subprocess
import sys

import pytest
from command import environ_of, ranks_by_hand, slurm_variables
from marks import mostly_nightly
from programs import run_programs
from repository import ROOT, SUPPORT

SCRIPT = str(SUPPORT / "launched_script.py")
EXCHANGE = str(SUPPORT / "mpi_exchange_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command, **environ):
    """The script's answers by rank, and the output of a run that must succeed."""
    result = start(command, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    return by_rank(result.stdout)


def by_rank(output):
    """The answers in the output of ranks."""
    said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda answer: answer["rank"])


def start(command, **environ):
    """Runs to the end; the launcher's own variables are no other launcher's leftovers."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_"))}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT}:{SUPPORT}", **environ}
    return subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def answers(world_size, *torch_distributed, numerics="rank_order"):
    """What the script must say on every rank, in a job for each of `torch_distributed`."""
    same = {"world_size": world_size, "numerics": numerics, "right": True}
    return [
        {"rank": rank, "local_rank": rank, "torch_distributed": when, **same}
        for rank in range(world_size)
        for when in torch_distributed
    ]


def mpi(name):
    """(mpirun, python) of the environment that `make .venv-<name>/ready` makes."""
    folder = ROOT / f".venv-{name}" / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(f"no {folder}: run `make .venv-{name}/ready`")
    options = {"openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"], "mpich": []}[name]
    return [str(folder / "mpirun"), *options, "-n", "2"], str(folder / "python")


def command_of(launcher):
    """What starts a script on two ranks."""
    if launcher == "torchrun":
        return TORCHRUN
    mpirun, python = mpi(launcher)
    return [*mpirun, python]


@pytest.mark.thorough
@pytest.mark.parametrize("when", mostly_nightly([["never", "group", "before"], ["after", "never"]], 0))
def test_torchrun(when):
    """Jobs one after the other in one launch. Gloo is in one of them: in the launcher's store, the ranks of a second
    group find each other's addresses of the first one."""
    assert run([*TORCHRUN, SCRIPT, *when], SYNCENGINE_NUMERICS="ring") == answers(2, *when, numerics="ring")


TOLD = "Aborted: rank 1 failed in init: ValueError: the disk is full"
AWAY = "Timeout: rank 1 did not join (did its process call syncengine.init?) within 1 s"
MET = [f"[b'{word} 0', b'{word} 1']" for word in ("next", "last")]
EXCHANGES = {
    "told": [[TOLD, TOLD], ["told", "told"]],
    "stale": [[AWAY, "[b'new 0', b'new 1']"], ["away", "[b'new 0', b'new 1']"]],
    "untaken": [[AWAY], ["took it"]],
    "ahead": [["ahead", "[b'new 0', b'new 1']"], ["True", "[b'new 0', b'new 1']"]],
    "anew": [["Aborted: a bad day"] * 3] * 2,
    "late": [MET, [f"Aborted: rank 0 failed in init: ValueError: the {n}" for n in ("first", "second", "third")] + MET],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_nightly(["openmpi", "mpich"], 1))
def test_mpirun(name):
    """Exchanges that fail, init after them, and the script, in one job.

    "untaken" is for Open MPI, which sends no 64 KiB ahead.
    """
    mpirun, python = mpi(name)
    cases = [case for case in (*EXCHANGES, "init_again", "jobs") if case != "untaken" or name == "openmpi"]
    said = {case: [] for case in cases}
    scripts = []
    for answer in run([*mpirun, python, EXCHANGE, *cases]):
        if "case" in answer:
            said[answer["case"]].append(answer["answers"])
        else:
            scripts.append(answer)
    assert scripts == answers(2, "never", "group", "group")
    assert said.pop("jobs") == [[], []]
    told, own = said.pop("init_again")
    assert said == {case: EXCHANGES[case] for case in said}
    assert told[0] == f"Aborted: rank 1 failed in init: {own[0]}"
    assert own[0].startswith("InvalidUsage: ")
    assert told[1] == own[1] == "2"


@pytest.mark.nightly
def test_mpi4py_of_another_mpi_is_refused():
    """Open MPI under MPICH's mpirun: each rank is a world of its own. (The other way round MPICH itself aborts.)"""
    mpirun, _ = mpi("mpich")
    _, python = mpi("openmpi")
    # Without shared memory: MPICH's mpirun kills the second rank, and Open MPI would leave its files in /dev/shm.
    result = start([*mpirun, python, SCRIPT, "never"], OMPI_MCA_btl="self")
    assert result.returncode != 0
    assert "mpi4py uses another MPI than the launcher" in result.stderr


def started(programs, environs, when):
    """The script's answers in processes with these environments, which end well."""
    ranks = run_programs(programs, [SCRIPT, when], environs)
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), [rank.stderr for rank in ranks]
    return by_rank("".join(rank.stdout for rank in ranks))


def test_plain_process(programs):
    assert started(programs, [environ_of()], "never") == answers(1, "never")


def test_ranks_started_by_hand(programs, unused_port):
    """Without a launcher's agent rank 0 serves the store; the user's own env:// group shares its port."""
    first, second = ranks_by_hand([{"MASTER_ADDR": "localhost"}] * 2, unused_port)
    assert started(programs, [second, first], "after") == answers(2, "after")  # who serves the store comes last


def test_slurm_variables(programs, unused_port):
    """srun's variables, set by hand: rank 0's address comes from the list of nodes."""
    environs = [environ_of(**variables) for variables in slurm_variables(2, unused_port)]
    assert started(programs, environs, "never") == answers(2, "never")
