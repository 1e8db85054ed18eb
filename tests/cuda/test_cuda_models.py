"""Models that users train on CUDA, bit equal to DDP over Gloo.

Skipped where there is no GPU; `make gpu` runs them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cuda_ranks import marked, needs_real, run_processes
from cuda_training import batch, job
from parallel_models import Mlp
from test_cuda_conformance import same
from test_cuda_equality import ADAM, Run, train
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import syncengine
from examples.gpt.model import GPT, GPTConfig
from syncengine.errors import InvalidUsage


class Gpt(nn.Module):
    """Attention by plain products: the backward of the fused kernels adds in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocabulary=97, context=24, layers=2, heads=2, width=32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.gpt((x.float() * 1000).long() % 97)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(-1, 4, 6))[0]


def synchronized_norm() -> nn.Module:
    layers = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.SyncBatchNorm.convert_sync_batchnorm(layers)


def compiled(backend: str) -> nn.Module:
    return torch.compile(Mlp(), backend=backend)


RUNS = {
    "gpt": Run(model=Gpt, optimizer=ADAM),
    "gpt in bfloat16 by autocast": Run(model=Gpt, optimizer=ADAM, autocast=torch.bfloat16, accumulate=2),
    "compiled, by eager kernels": Run(model=partial(compiled, "aot_eager")),
}
REAL_RUNS = {
    "lstm by cuDNN": Run(model=Lstm),
    "SyncBatchNorm": Run(model=synchronized_norm),
    "compiled by Inductor": Run(model=partial(compiled, "inductor")),
}


def trains_as_ddp(rank: int, run: Run) -> bool:
    with job():
        ours, theirs = train(syncengine.Parallel, run), train(DistributedDataParallel, run)
        return len(ours) == len(theirs) and all(map(same, ours, theirs))


@marked
@pytest.mark.parametrize("name", RUNS)
def test_training_is_bit_equal_to_ddp(name: str):
    assert run_processes(2, partial(trains_as_ddp, run=RUNS[name])) == [True, True]


@needs_real("kernels of cuDNN, SyncBatchNorm and compilers")
@marked
@pytest.mark.parametrize("name", REAL_RUNS)
def test_training_by_kernels_of_a_gpu_is_bit_equal_to_ddp(name: str):
    assert run_processes(2, partial(trains_as_ddp, run=REAL_RUNS[name])) == [True, True]


def shards(rank: int) -> str:
    with job():
        model = syncengine.Parallel(nn.Linear(24, 24).cuda())
        with pytest.raises(InvalidUsage, match=r"ShardedOptimizer is for CPU models, but a parameter is on cuda:\d"):
            syncengine.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0)).sum().backward()  # and it can still be trained
    return "good"


@marked
def test_a_sharded_optimizer_is_refused():
    assert run_processes(2, shards) == ["good"] * 2
