"""Models that users train on CUDA, bit equal to DDP over Gloo.

Skipped where there is no GPU; `make gpu` runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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
from torch.utils.data import DataLoader, TensorDataset

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


class Normed(nn.Module):
    """Its buffers are written by kernels that leave versions as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def numbered(rank: int, model: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, str]:
    """Digests of a model's weights and buffers behind steps of six micro-batches."""
    with job():
        torch.manual_seed(7)
        parallel = syncengine.Parallel(model().to(dtype).cuda())
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(TensorDataset(torch.randn(72, 24)), batch_size=4)
        batches = syncengine.micro_batches(parallel, loader, total=6)
        for _ in range(3):
            for _, (x,) in batches:
                parallel(x.to(dtype).cuda()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value.cpu().reshape(-1).view(torch.uint8) for name, value in parallel.state_dict().items()}
        return {name: hashlib.sha256(bytes(value.tolist())).hexdigest() for name, value in state.items()}


@marked
@pytest.mark.parametrize(
    ("model", "dtype"), [(Mlp, torch.float32), (Mlp, torch.bfloat16), (Normed, torch.float32)], ids=str
)
def test_micro_batches_have_the_bits_of_any_number_of_ranks(model: Callable[[], nn.Module], dtype: torch.dtype):
    alone = run_processes(1, partial(numbered, model=model, dtype=dtype))
    for world in (2, 3, 4):
        assert run_processes(world, partial(numbered, model=model, dtype=dtype)) == alone * world


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
