"""`srun` and a batch script under a real Slurm: one node, as root, without cgroups. Debian: slurm-wlm."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import unused_ports
from repository import ROOT

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
SBIN = f"{os.environ['PATH']}:/usr/sbin"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
    pytest.mark.skipif(not all(shutil.which(each, path=SBIN) for each in DAEMONS), reason="no slurm-wlm"),
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ctld}
SlurmdPort={slurmd}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
TRAIN = """
import torch
import syncengine
communicator = syncengine.init()
x = torch.full((4,), float(communicator.rank + 1))
syncengine.all_reduce(x)
from syncengine.communicator import launcher
print(launcher(), communicator.rank, communicator.size, x.tolist())
"""


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the programs of a Slurm that has one idle node."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    ctld, slurmd = unused_ports(2)
    text = CONFIGURATION.format(folder=folder, host=host, ctld=ctld, slurmd=slurmd, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    environ = {**os.environ, "PATH": SBIN, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munged += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"]
    running = []
    try:
        for command in (munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
            with (folder / f"{command[0]}.out").open("w") as out:
                running.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
            if command is munged:
                wait_for((folder / "munge.socket").exists, "munged")
        wait_for(lambda: "idle" in said("sinfo", "--noheader", "-o", "%T", environ=environ), "an idle node")
        yield environ
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


def said(*command: object, environ: dict[str, str]) -> str:
    done = subprocess.run([str(part) for part in command], env=environ, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def expected(ranks: int) -> list[str]:
    total = float(ranks * (ranks + 1) // 2)
    return [f"slurm {rank} {ranks} {[total] * 4}" for rank in range(ranks)]


def lines_of_ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("slurm "))


def test_srun(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    text = said("srun", "-n", 2, "--oversubscribe", sys.executable, tmp_path / "train.py", environ=cluster)
    assert lines_of_ranks(text) == expected(2), text


def test_the_batch_script(cluster, tmp_path):
    """Run as it is, but for the size of the job."""
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {**cluster, "PATH": f"{Path(sys.executable).parent}:{cluster['PATH']}"}
    options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--wait", f"--output={tmp_path}/out"]
    script = ROOT / "examples" / "clusters" / "train.sbatch"
    said("sbatch", *options, script, tmp_path / "train.py", environ=environ)
    assert lines_of_ranks((tmp_path / "out").read_text()) == expected(2)
