"""`srun` and a batch script under a real Slurm: one node, as root, without cgroups. Debian: slurm-wlm."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT
from slurm import is_there, slurm

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not is_there, reason="no Slurm (Debian: slurm-wlm), or not root")]
TRAIN = """
import torch
import syncengine
communicator = syncengine.init()
x = torch.full((4,), float(communicator.rank + 1))
syncengine.all_reduce(x)
from syncengine.communicator import launcher
print(launcher(), communicator.rank, communicator.size, x.tolist())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the programs of a Slurm that has one idle node."""
    with slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield {**os.environ, "OMP_NUM_THREADS": "1", **environ}


def said(*command: object, environ: dict[str, str]) -> str:
    done = subprocess.run([str(part) for part in command], env=environ, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def check_lines(text: str) -> None:
    """Each of two ranks has written the sum over both."""
    lines = sorted(line for line in text.splitlines() if line.startswith("slurm "))
    assert lines == [f"slurm {rank} 2 {[3.0] * 4}" for rank in range(2)], text


def test_srun(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    check_lines(said("srun", "-n", 2, sys.executable, tmp_path / "train.py", environ=cluster))


def test_the_batch_script(cluster, tmp_path):
    """Run as it is, but for the size of the job."""
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {**cluster, "PATH": f"{Path(sys.executable).parent}:{cluster['PATH']}"}
    options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--wait", f"--output={tmp_path}/out"]
    script = ROOT / "examples" / "clusters" / "train.sbatch"
    said("sbatch", *options, script, tmp_path / "train.py", environ=environ)
    check_lines((tmp_path / "out").read_text())
