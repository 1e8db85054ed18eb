"""Batches of different sizes: the weighted mean, against float64 and against the plain one."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from marks import mostly_nightly
from parallel_models import Mlp, averages, data, different_bits, gradients
from pool import RankPool, run_on_ranks
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

import syncengine
from syncengine.errors import Aborted, InvalidUsage, Mismatch

SIZES = [5, 1, 9, 3]  # of the batches, by rank


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(SIZES[rank], 24, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def errors_against_all_samples() -> list[float]:
    """Largest relative distance of gradients from those over all samples at once in float64: weighted, and not."""
    rank, world = syncengine.rank(), syncengine.world_size()
    torch.manual_seed(0)
    exact = Mlp().double()
    torch.manual_seed(0)
    model = syncengine.Parallel(Mlp())
    worst = [0.0, 0.0]
    for way, weighted in enumerate((True, False)):
        for step in range(3):
            samples = torch.cat([batch(r, step) for r in range(world)]).double()
            expected = torch.autograd.grad(loss_of(exact, samples), list(exact.parameters()))
            model.zero_grad()
            if weighted:
                model.weight(SIZES[rank])
            loss_of(model, batch(rank, step)).backward()
            for p, grad in zip(model.parameters(), expected, strict=True):
                worst[way] = max(worst[way], ((p.grad - grad).norm() / grad.norm()).item())
    return worst


@pytest.mark.parametrize("mode", ["rank_order", "ring"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_weighted_mean_is_that_over_all_samples(pool: RankPool, world: int, mode: str):
    for weighted, plain in pool.run(errors_against_all_samples, world=world, settings={"numerics": mode}):
        assert weighted < 2e-6
        assert plain > 1e-2  # so the sizes do matter here


@pytest.mark.parametrize("numerics", mostly_nightly(["rank_order", "ring"], 0))
@run_on_ranks(world=3)
def test_equal_weights_have_the_bits_of_none(numerics: str):
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for weight in (None, 1, 7, 0.1):
            torch.manual_seed(0)
            model = syncengine.Parallel(Mlp().to(dtype))
            for step in range(3):
                model.zero_grad()
                if weight is not None:
                    model.weight(weight)
                loss_of(model, batch(syncengine.rank(), step).to(dtype)).backward()
            results.append(gradients(model))
        assert not any(different_bits(results[0], other) for other in results[1:]), dtype


@run_on_ranks(world=3)
def test_a_rank_without_samples_brings_nothing():
    """A batch without samples: its mean is NaN, and nobody shall see it."""
    rank = syncengine.rank()
    model = syncengine.Parallel(nn.Linear(24, 3))
    model.weight(0 if rank == 1 else 4)
    x = torch.empty(0, 24) if rank == 1 else torch.full((4, 24), float(rank))
    loss = model(x).mean()
    assert loss.isnan().item() == (rank == 1)
    loss.backward()
    assert torch.allclose(model.module.weight.grad, torch.full((3, 24), (0 + 2) / 2 / 3))


@run_on_ranks(world=3)
def test_a_weight_holds_for_one_synchronized_forward():
    rank = syncengine.rank()
    model = syncengine.Parallel(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), 12.0 * (rank + 1))
    model.weight([1, 3, 4][rank])
    with torch.no_grad():
        model(x)
    with model.no_sync():
        model(x).backward()  # neither uses it up
    model(x).backward()
    assert model.module.weight.grad.item() == (1 * 24 + 3 * 48 + 4 * 72) / 8
    model.zero_grad()
    model(x).backward()
    assert model.module.weight.grad.item() == (12 + 24 + 36) / 3


@run_on_ranks(world=3)
def test_weights_in_a_join_context():
    rank = syncengine.rank()
    model = syncengine.Parallel(nn.Linear(1, 1, bias=False))
    model.weight(rank + 1)
    expected = [6.0 * (0 * 1 + 1 * 2 + 2 * 3) / 6, 6.0 * (1 * 2 + 2 * 3) / 5, 12.0]
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            if step:
                model.weight(rank + 1)
            model(torch.full((1, 1), 6.0 * rank)).backward()
            assert model.module.weight.grad.item() == pytest.approx(expected[step])


@run_on_ranks(world=3)
def test_a_weight_is_dropped_with_a_forward_that_ranks_vote_down():
    rank = syncengine.rank()
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("seen", torch.zeros(1))
    model = syncengine.Parallel(module)
    model._register_buffer_comm_hook(
        None, lambda _, buffers: syncengine.all_reduce(buffers["seen"]), _BufferCommHookLocation.POST_FORWARD
    )
    backwards = []
    for width in (1, 2 if rank == 1 else 1, 1):
        model.zero_grad()
        if len(backwards) < 2:
            model.weight(rank + 1)
        with contextlib.suppress(RuntimeError):  # of torch, for a batch that is too wide, and Aborted
            model(torch.full((1, width), 6.0 * rank)).backward()
        backwards.append(model.sync_stats()["backwards"])
    assert module.weight.grad.item() == (0 + 6 + 12) / 3
    assert backwards == [1, 2, 3]


@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_what_is_no_weight_is_refused(world: int):
    model = syncengine.Parallel(nn.Linear(24, 2))
    for weight in (-1, float("nan"), float("inf"), "many", None):
        with pytest.raises(InvalidUsage, match=r"weight\(.*finite number"):
            model.weight(weight)
    model.weight(0)
    if world > 1:
        with pytest.raises(InvalidUsage, match="no mean with such weights"):
            model(batch(0))
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("joined", [True, False])
@run_on_ranks(world=3)
def test_a_weight_on_one_rank_only_is_an_error_on_all(joined: bool):
    text = r"rank 0 called weight\(\), but rank 1 did not" if joined else "all_gather|collective call"
    with pytest.raises(Mismatch, match=text):  # the others may be one call ahead
        model = syncengine.Parallel(nn.Linear(24, 2))
        with model.join(enable=joined):
            if syncengine.rank() == 0:
                model.weight(3)
            if syncengine.rank() < 2 or not joined:
                model(batch(0)).sum().backward()


@run_on_ranks(world=3, gloo=True)
def test_weights_where_a_tool_arms_the_reducer():
    """Lightning's manual optimization in or after a forward; Accelerate's trigger after a forward under no_sync."""
    rank, weights = syncengine.rank(), [4.0, 1.0, 3.0]
    model = syncengine.Parallel(nn.Linear(24, 3))

    def arm() -> None:
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])

    def end_forward(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        loss = output.square().mean()
        if how == "inside":
            arm()
            loss.backward()
        if how in ("inside", "after"):
            model.require_backward_grad_sync = False
        return loss

    with model.module.register_forward_hook(end_forward):
        for i, (how, given) in enumerate(itertools.product(("no_sync", "after", "inside", ""), (True, False))):
            x = batch(rank, i)
            model.zero_grad()
            if given:
                model.weight(weights[rank])
            with model.no_sync() if how == "no_sync" else contextlib.nullcontext():
                loss = model(x)
            model.require_backward_grad_sync = True
            if how in ("no_sync", "after"):
                arm()
            if how != "inside":
                loss.backward()
            share = 3 * weights[rank] / sum(weights) if given else 1.0
            expected = averages(model, model.module.forward(x).square().mean() * share)  # past the hook
            torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6, msg=f"{how}, {given}")


@run_on_ranks(gloo=True)
def test_a_weight_within_the_forward_is_refused_and_costs_a_step():
    model, rank = syncengine.Parallel(nn.Linear(24, 3)), syncengine.rank()
    text = r"weight\(\d\) was called within the forward of Parallel\(Linear\).*: call it before the forward"
    for joined in (False, True):
        hook = model.module.register_forward_pre_hook(lambda _, inputs: model.weight(len(inputs[0])))
        with model.join(enable=joined), pytest.raises(InvalidUsage, match=text):
            model(batch(rank))
        hook.remove()
        with model.join(enable=joined):
            model.zero_grad()
            loss_of(model, batch(rank)).backward()
            expected = averages(model, loss_of(model.module, batch(rank)))
            torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)


@run_on_ranks()
def test_a_weight_within_the_forward_of_one_rank_is_an_error_on_all():
    model = syncengine.Parallel(nn.Linear(24, 3))
    if syncengine.rank() == 1:
        model.module.register_forward_pre_hook(lambda _, inputs: model.weight(len(inputs[0])))
    text = r"was called within the forward of Parallel\(Linear\)"
    with pytest.raises(InvalidUsage if syncengine.rank() == 1 else Aborted, match=text):
        model(data()).sum().backward()
