"""The example for Horovod's users, really launched; its weights are those of the same training by DDP over Gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_launchers_real import TORCHRUN, mpi, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples.horovod_mnist import digits, make_model


def train_by_ddp() -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    dataset = digits(1024)
    sampler = DistributedSampler(dataset)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * size, momentum=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi", "mpich"])
def test_example_has_the_weights_of_ddp(pool, tmp_path: Path, launcher: str):
    file = tmp_path / "weights.pt"
    script = ["-m", "examples.horovod_mnist", f"--save={file}"]
    if launcher == "torchrun":
        command = [*TORCHRUN, *script]
    else:
        mpirun, python = mpi(launcher)
        command = [*mpirun, python, *script]
    result = start(command)
    assert result.returncode == 0, result.stdout + result.stderr
    said = [line for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert len(said) == 2
    assert said[-1].endswith("on 2 ranks")
    assert float(said[-1].split("accuracy ")[1].split()[0]) > 0.8
    trained = torch.load(file, weights_only=True)
    for expected in pool.run(train_by_ddp, settings=None, gloo=True):
        assert trained.keys() == expected.keys()
        assert all(torch.equal(trained[name], expected[name]) for name in trained)


def test_example_alone(tmp_path: Path):
    result = start([sys.executable, "-m", "examples.horovod_mnist", "--epochs=1", "--fp16-allreduce"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on 1 ranks" in result.stdout
