"""Arguments of DDP about memory and buckets: accepted, with its bits, in this engine's ways."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from parallel_models import CAP, Branches, Mlp, assert_averaged, both, data, gradients
from pool import run_on_ranks
from torch import nn

import syncengine
from syncengine.errors import SyncError
from syncengine.parallel.buckets import BucketPlanner


@run_on_ranks()
def test_gradients_stay_where_they_are():
    """What users of gradient_as_bucket_view rely on: no second copy, and addresses that last."""
    model = syncengine.Parallel(Mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addresses = []
    for i in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(data(i)).square().mean().backward()
        optimizer.step()
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
        copied = model.sync_stats()["copied_bytes"]
        assert copied.pop("small") <= sum(p.nbytes for p in model.parameters() if p.nbytes < 4096)
        assert not any(copied.values())
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]


@pytest.mark.thorough
@run_on_ranks(world=3, gloo=True, settings={"timeout": 60.0, "numerics": "ring"})
def test_gradients_of_before_are_scaled_as_by_ddp_with_views():
    """The program's own, which a model has before wrapping, or gets behind it."""

    def give(module: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(syncengine.rank())
        for parameter in module.parameters():
            parameter.grad = torch.rand(parameter.shape, generator=generator)
        return module

    def step(model: nn.Module, before: bool, zeroed: bool) -> list[torch.Tensor | None]:
        if not before:
            give(model)
        averages = []
        for i in range(3):
            model(data(i)).square().mean().backward()
            averages += gradients(model)
            if zeroed:
                model.zero_grad(set_to_none=False)
        return averages

    for before, zeroed in itertools.product((False, True), repeat=2):
        make = (lambda: give(Mlp())) if before else Mlp
        both(make, partial(step, before=before, zeroed=zeroed), gradient_as_bucket_view=True)


def test_buckets_come_in_the_order_in_which_they_fill():
    """Those too that no cap has closed: torch's order of these depends on the device, and so on the rank."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16]
    parameters = [torch.empty(10, dtype=dtype) for dtype in dtypes]
    planner = BucketPlanner.create(parameters, [False] * 5, True, False, None, None)
    assert planner.rebuilt(range(5)) == [[1], [0, 3], [2, 4]]


# --- skip_all_reduce_unused_params


@run_on_ranks(gloo=True)
def test_unused_buckets_are_skipped():
    reduced = []
    for skip in (False, True):
        model = syncengine.Parallel(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=skip, **CAP)
        model(data(), True).sum().backward()
        reduced.append(model.sync_stats()["reduced_bytes"])
        assert model.module.right.weight.grad is None
        used = nn.ModuleList([model.module.stem, model.module.left])
        assert_averaged(used, model.module(data(), True).sum())
    assert reduced[0] - reduced[1] == 2 * 4 * (24 * 24 + 24)


@run_on_ranks()
def test_ranks_that_skip_different_buckets_hear_of_it():
    """DDP hangs."""
    model = syncengine.Parallel(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **CAP)
    with pytest.raises(SyncError, match="is used on some ranks and not on others"):
        model(data(), syncengine.rank() == 0).sum().backward()


# --- Higher-order gradients


@run_on_ranks()
def test_double_and_complex_gradients_of_gradients():
    """A penalty on the gradient: backward through a backward, then the average of the whole."""
    for dtype in (torch.float64, torch.complex128):
        torch.manual_seed(0)
        module = nn.Linear(24, 3, dtype=dtype)

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x.to(dtype).requires_grad_()  # noqa: B023 (called at once)
            out = model(x).abs().square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            return out + slope.abs().square().sum()

        expected = 0
        for rank in range(2):
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
            expected = expected + torch.autograd.grad(loss(module, x), module.weight)[0] / 2
        model = syncengine.Parallel(module)
        loss(model, data()).backward()
        torch.testing.assert_close(module.weight.grad, expected)
