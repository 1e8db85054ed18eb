"""The bits of whole training runs: Parallel against DDP over Gloo in the same processes, and against itself."""

from __future__ import annotations

import hashlib

import pytest
import torch
from marks import mostly_nightly
from parallel_models import Run, bits_between_ours_and_ddp, train
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import IS_SINCE_2_13

import syncengine

ALGORITHMS = ["auto", "direct", "staged", "one_shot"]


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 4, 8], 1))
def test_ring_is_bit_equal_to_ddp_at_any_size(pool: RankPool, world: int):
    runs = [
        Run(),
        Run(dtype=torch.float16, steps=3),
        Run(dtype=torch.bfloat16, steps=3),
        Run(dtype=torch.float64, steps=3),
        Run(optimizer="adamw", accumulate=2, set_to_none=False),
        Run(model="conv"),
        Run(model="tied"),
        Run(model="mixed", dtype=None),
        Run(options=(("bucket_cap_mb", 0.5),)),
        Run(options=(("find_unused_parameters", True),)),
        Run(model="waves", dtype=None),
        *(
            Run(model="waves", dtype=None, steps=8, set_to_none=False, options=((name, True),))
            for name in ("gradient_as_bucket_view", "batched_grad_copy")[: 1 + IS_SINCE_2_13]
        ),
    ]
    answers = pool.run(bits_between_ours_and_ddp, runs, world=world, gloo=True, settings={"numerics": "ring"})
    assert answers == [dict.fromkeys(runs, 0)] * world


def digest_of_training(runs: list[Run]) -> list[str]:
    """One digest a run: the same training in the default numerics must give the same one, however it is carried out."""
    digests = []
    for run in runs:
        digest = hashlib.sha256()
        for tensor in train(syncengine.Parallel, run):
            digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
        digests.append(digest.hexdigest())
    return digests


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 8], 1))
def test_rank_order_does_not_depend_on_buckets_algorithm_or_run(pool: RankPool, world: int):
    caps = [None, 0.001, 0.3, 100.0]
    for dtype in (torch.float32, torch.bfloat16):
        runs = [Run(dtype=dtype, steps=3, options=(("bucket_cap_mb", cap),)) for cap in [*caps, None]]
        seen = set()
        for algorithm in ALGORITHMS:
            environ = {"SYNCENGINE_TEST_ALGORITHM": algorithm}
            for answer in pool.run(digest_of_training, runs, world=world, environ=environ):
                seen.update(answer)
        assert len(seen) == 1


def test_digests_tell_trainings_apart(pool: RankPool):
    """Guards the test above: another batch size gives another digest."""
    first, second = pool.run(digest_of_training, [Run(steps=1), Run(steps=1, batch=5)])[0]
    assert first != second


class Given(nn.Module):
    """A module whose gradient is whatever is put in."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def average(wrap: type, gradient: torch.Tensor) -> torch.Tensor:
    model = wrap(Given(gradient.numel(), gradient.dtype))
    model(gradient).backward()
    return model.module.weight.grad


def gradient_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(rank)).to(dtype)


def averages_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """In float64, of each rank's gradient: the exact average, ours and DDP's."""
    exact = sum(gradient.double() for gradient in gradients) / len(gradients)
    wraps = (syncengine.Parallel, DistributedDataParallel)
    return [exact, *(average(wrap, gradients[syncengine.rank()]).double() for wrap in wraps)]


@pytest.mark.parametrize("world", mostly_nightly([3, 4, 8], 0))
@run_on_ranks(gloo=True)
def test_rank_order_is_nearer_to_the_exact_mean_than_ddp(world: int):
    exact, ours, theirs = averages_of([gradient_of(rank, torch.bfloat16) for rank in range(world)])
    assert (ours - exact).abs().mean() < 0.8 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("world", mostly_nightly([2, 4, 8], 1))
@pytest.mark.parametrize("numerics", ["rank_order", "ring"])
@run_on_ranks(gloo=True)
def test_scaled_integers_are_exact_in_every_mode(numerics: str, world: int):
    """Gradients that are small integers times a power of two: every order of summation is exact."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    integers = [torch.randint(-16, 17, (30_011,), generator=generator) for generator in generators]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        exact, ours, theirs = averages_of([(each * 2.0**-3).to(dtype) for each in integers])
        assert torch.equal(ours, exact.to(dtype).double())
        assert torch.equal(theirs, ours)
