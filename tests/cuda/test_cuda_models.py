"""Models that users train on CUDA, bit equal to DDP over Gloo."""

import hashlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cuda_ranks import marked, needs_real, run_processes
from cuda_training import batch, job, on_gpus
from parallel_models import Mlp
from test_cuda_equality import ADAM, Run, differ
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
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


def normed(width: int = 16) -> nn.Module:
    """A model whose buffers are written by kernels that leave versions as they are."""
    return nn.Sequential(nn.Linear(24, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def synchronized_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(normed(width=8))


def compiled(backend: str) -> nn.Module:
    return torch.compile(Mlp(), backend=backend)


real = needs_real("kernels of cuDNN, SyncBatchNorm and compilers")


@on_gpus()
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(model=Gpt, optimizer=ADAM), id="gpt"),
        pytest.param(
            Run(model=Gpt, optimizer=ADAM, autocast=torch.bfloat16, accumulate=2), id="gpt in bfloat16 by autocast"
        ),
        pytest.param(Run(model=partial(compiled, "aot_eager")), id="compiled, by eager kernels"),
        pytest.param(Run(model=Lstm), id="lstm by cuDNN", marks=real),
        pytest.param(Run(model=synchronized_norm), id="SyncBatchNorm", marks=real),
        pytest.param(Run(model=partial(compiled, "inductor")), id="compiled by Inductor", marks=real),
    ],
)
def test_training_is_bit_equal_to_ddp(rank: int, run: Run):
    return differ([run])


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
@pytest.mark.parametrize(("model", "dtype"), [(Mlp, torch.float32), (Mlp, torch.bfloat16), (normed, torch.float32)])
def test_micro_batches_have_the_bits_of_any_number_of_ranks(model: Callable[[], nn.Module], dtype: torch.dtype):
    alone = run_processes(1, partial(numbered, model=model, dtype=dtype))
    for world in (2, 3, 4):
        assert run_processes(world, partial(numbered, model=model, dtype=dtype)) == alone * world


@on_gpus()
def test_a_sharded_optimizer_is_refused(rank: int):
    model = syncengine.Parallel(nn.Linear(24, 24).cuda())
    with pytest.raises(InvalidUsage, match=r"ShardedOptimizer is for CPU models, but a parameter is on cuda:\d"):
        syncengine.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(batch(0)).sum().backward()  # and it can still be trained
