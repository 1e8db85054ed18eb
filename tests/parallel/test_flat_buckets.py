"""Flat buckets, as on a device, but in host memory: all of that path but streams and kernels, against DDP.

What works the same in both kinds of buckets (hooks, sparse gradients, mixed precision) is tested with both where it is
at home: see the fixture `kinds_of_buckets`.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from flat import flat, flat_buckets
from marks import mostly_nightly
from parallel_models import CAP, Run, assert_averages, backwards, data, different_bits, gradients, small, train
from pool import run_on_ranks
from test_parallel_weights import errors_against_all_samples
from test_torch_comm_hooks import TORCH_HOOKS, plain, with_hook
from torch.nn.parallel.distributed import _MixedPrecision

import syncengine
from syncengine.errors import InvalidUsage


def check_in_place(run: Callable[[], list[torch.Tensor]]) -> None:
    """It has the bits that it has with buckets in place."""
    in_place = run()
    with flat_buckets():
        assert different_bits(run(), in_place) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([3, 4], 0))
@run_on_ranks()
def test_rank_order_has_the_bits_of_buckets_in_place(world: int):
    runs = [Run(), Run(dtype=torch.float16), Run(model="conv"), Run(model="tied", accumulate=2)]
    runs += [Run(model="mixed", dtype=None), Run(dtype=torch.float64, options=(("bucket_cap_mb", 0.5),))]
    runs += [Run(dtype=torch.bfloat16, optimizer="adamw", accumulate=3, set_to_none=False)]
    runs += [Run(options=((name, True),)) for name in ("find_unused_parameters", "static_graph")]
    runs += [Run(options=(("gradient_as_bucket_view", True), ("bucket_cap_mb", 0.5)))]
    for run in runs:
        check_in_place(lambda run=run: train(syncengine.Parallel, run))


HOOKS = {name: TORCH_HOOKS[name] for name in ("native all-reduce", "native fp16")}
HOOKS |= {"bf16": plain(syncengine.hooks.bf16_compress), "mixed precision": lambda model: None}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_nightly(HOOKS, 1, 3))
@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 0))
@run_on_ranks(world=3)
def test_hooks_of_the_engine_have_the_bits_of_buckets_in_place(numerics: str, name: str):
    """Where 1/N is not exact, the order of scaling and rounding shows."""
    options = (("mixed_precision", _MixedPrecision(torch.bfloat16)),) if name == "mixed precision" else ()
    for run in (Run(options=options), Run(accumulate=2, set_to_none=False, options=options)):
        check_in_place(lambda run=run: train(partial(with_hook, syncengine.Parallel, HOOKS[name]), run))


@run_on_ranks()
def test_compression_may_come_when_buckets_are_there():
    def compress_from_the_third_step_on() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = syncengine.Parallel(small(), **CAP)
        backwards(model)
        exact = [p.grad for p in model.parameters()]
        HOOKS["bf16"](model)
        backwards(model)
        rounded = [p.grad for p in model.parameters()]
        assert not all(map(torch.equal, exact, rounded))
        assert all(torch.equal(grad, grad.bfloat16().float()) for grad in rounded)
        return rounded

    check_in_place(compress_from_the_third_step_on)


@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 0))
@run_on_ranks(world=3)
def test_weights(numerics: str):
    weighted, plain = flat(errors_against_all_samples)
    assert weighted < 2e-6
    assert plain > 1e-2


@run_on_ranks()
def test_a_kept_gradient_does_not_change():
    with flat_buckets():
        model = syncengine.Parallel(small())
        backwards(model)
        assert model.sync_stats()["copied_bytes"]["bucket"] == model.sync_stats()["reduced_bytes"] > 0
        kept, values = [p.grad for p in model.parameters()], gradients(model)
        backwards(model, 1)
        assert all(map(torch.equal, kept, values))
        assert all(grad.detach_().untyped_storage().nbytes() == grad.nbytes for grad in kept)


@run_on_ranks(gloo=True)
def test_a_first_forward_under_a_transform():
    """The first forward, in which buckets are laid out, runs under torch.func's."""
    with flat_buckets():
        model = syncengine.Parallel(small())
        parameters = dict(model.named_parameters())
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (data(),)).sum())(parameters)
        for i in range(3):
            assert_averages(model, model.module(data(i)).var(), torch.var, data(i))


@run_on_ranks(gloo=True, settings={"timeout": 100.0, "arena_bytes": 128 << 20})
def test_a_model_for_whose_buckets_there_was_no_memory_goes_on_when_there_is():
    """The arena is full when a part of 20 MB is thawed."""
    module = torch.nn.Sequential(torch.nn.Linear(24, 4), torch.nn.Linear(4, 1 << 20))
    module[1].requires_grad_(False)
    with flat_buckets():
        model = syncengine.Parallel(module)
    model(data()).sum().backward()
    module[1].requires_grad_(True)
    taken = []
    with contextlib.suppress(InvalidUsage):
        while True:
            taken.append(syncengine.empty(1 << 20))
    with pytest.raises(InvalidUsage, match="no room for"):
        model(data())
    taken.clear()
    assert_averages(model, module(data()).sum(), torch.sum, data())
