"""The bits of whole training runs: Parallel against DDP over Gloo in the same processes, and against itself."""

import hashlib

import pytest
import torch
from marks import mostly_nightly
from models import workload
from models.workload import train as train_workload
from parallel_models import Run, different_bits, train
from pool import RankPool, run_on_ranks
from random_layers import Layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import IS_SINCE_2_13

import syncengine


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 4, 8], 1))
@run_on_ranks(gloo=True, settings={"numerics": "ring"})
def test_ring_is_bit_equal_to_ddp_at_any_size(world: int):
    for run in (
        Run(),
        *(Run(dtype=dtype, steps=3) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
        Run(optimizer="adamw", accumulate=2, set_to_none=False),
        *(Run(model=model) for model in ("conv", "tied")),
        *(Run(model=model, dtype=None) for model in ("mixed", "waves")),
        *(Run(options=(option,)) for option in (("bucket_cap_mb", 0.5), ("find_unused_parameters", True))),
        *(
            Run(model="waves", dtype=None, steps=8, set_to_none=False, options=((name, True),))
            for name in ("gradient_as_bucket_view", "batched_grad_copy")[: 1 + IS_SINCE_2_13]
        ),
    ):
        assert not different_bits(train(syncengine.Parallel, run), train(DistributedDataParallel, run)), run


def digest_of_training(runs: list[Run]) -> list[str]:
    """One digest a run: the same training in the default numerics must give the same one, however it is carried out."""
    tensors = ([t.contiguous().view(-1).view(torch.uint8) for t in train(syncengine.Parallel, run)] for run in runs)
    return [hashlib.sha256(torch.cat(parts).numpy()).hexdigest() for parts in tensors]


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([2, 3, 8], 1))
def test_rank_order_does_not_depend_on_buckets_algorithm_or_run(pool: RankPool, world: int):
    for dtype in (torch.float32, torch.bfloat16):
        runs = [Run(dtype=dtype, steps=3, options=(("bucket_cap_mb", cap),)) for cap in (None, 0.001, 0.3, 100.0, None)]
        seen = set()
        for algorithm in ("auto", "direct", "staged", "one_shot"):
            environ = {"SYNCENGINE_TEST_ALGORITHM": algorithm}
            seen.update(*pool.run(digest_of_training, runs, world=world, environ=environ))
        assert len(seen) == 1


def test_digests_tell_trainings_apart(pool: RankPool):
    """Guards the test above: another batch size gives another digest."""
    assert len(set(pool.run(digest_of_training, [Run(steps=1), Run(steps=1, batch=5)])[0])) == 2


def averages_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """In float64, of each rank's gradient: the exact average, ours and DDP's."""
    own = gradients[syncengine.rank()]
    averages = [sum(gradient.double() for gradient in gradients) / len(gradients)]
    for wrap in (syncengine.Parallel, DistributedDataParallel):
        weight = nn.Parameter(torch.zeros_like(own))
        model = wrap(Layer(lambda self, gradient: (self.weight * gradient).sum(), weight=weight))
        model(own).backward()
        averages.append(weight.grad.double())
    return averages


@pytest.mark.parametrize("world", mostly_nightly([3, 4, 8], 0))
@run_on_ranks(gloo=True)
def test_rank_order_is_nearer_to_the_exact_mean_than_ddp(world: int):
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    exact, ours, theirs = averages_of([torch.randn(20_000, generator=each).bfloat16() for each in generators])
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


MODELS = [  # two ranks have the same bits in both numerics, but other buckets
    *((name, "rank_order", 2) for name in ("resnet18_channels_last", "gpt", "recommender", "experts")),
    *((name, "ring", 2) for name in ("resnet18", "gpt", "recommender_sparse", "experts", "lstm")),
    *((name, "ring", 3) for name in ("gpt", "experts")),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "numerics", "world"), mostly_nightly(MODELS, 1, 3, 6, 9))
@run_on_ranks(gloo=True)
def test_a_real_model_trains_to_the_bits_of_ddp(name: str, numerics: str, world: int):
    ours, theirs = (train_workload(wrap, workload(name)) for wrap in (syncengine.Parallel, DistributedDataParallel))
    different = ours.difference(theirs)
    assert not different, different
    unused = {"module.heads.task 2.bias", "module.heads.task 2.weight"} if name == "experts" else set()
    assert set(ours.state).difference(ours.moved()) == unused
