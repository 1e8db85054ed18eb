"""Errors that the user catches: what they cost, and whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_models import CAP, Mlp, data, different_bits, gradients
from pool import RankPool, run_on_ranks
from raising_model import Bad, InBackward, Raising
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncengine
from syncengine.errors import Aborted, InvalidUsage, SyncError


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, where: str = "") -> bool:
    """Whether the step was made."""
    model.module.where = where
    optimizer.zero_grad()
    try:
        model(data(i)).square().mean().backward()
    except Bad:
        return False
    optimizer.step()
    return True


def train(wrap: Callable[..., nn.Module], steps: list[tuple[int, str]], **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Raising()
    model = wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for i, where in steps:
        assert step(model, optimizer, i, where) == (not where)
    return [p.detach().clone() for p in module.parameters()]


OPTIONS: list[dict[str, Any]] = [{}, CAP, {"find_unused_parameters": True}, {"static_graph": True}]


def costs_one_step(places: dict[int, str]) -> None:
    """`places`: where each rank raises at steps 2 and 3."""
    mine = places[syncengine.rank()]
    without = [(i, "") for i in (0, 1, 4, 5)]
    for options in OPTIONS:
        # DDP can't do without the bad batches in the order of its buckets, which bits don't depend on with two ranks.
        expected = train(DistributedDataParallel, without, **options)
        ours = train(syncengine.Parallel, [*without[:2], (2, mine), (3, mine), *without[2:]], **options)
        assert not different_bits(ours, expected), options
    syncengine.barrier()


@pytest.mark.parametrize(
    "places",
    [
        ("forward", "forward"),
        ("early", "early"),
        ("middle", "middle"),
        ("late", "late"),
        ("early", "middle"),
        ("middle", "late"),
        ("forward", "middle"),
        ("early", "forward"),
    ],
    ids="-".join,
)
def test_an_error_of_all_ranks_costs_a_step(pool: RankPool, places: tuple[str, str]):
    pool.run(costs_one_step, dict(enumerate(places)), gloo=True)


def first_step_fails(where: str) -> None:
    for options in OPTIONS:
        expected = train(DistributedDataParallel, [(1, ""), (2, "")], **options)
        assert not different_bits(train(syncengine.Parallel, [(0, where), (1, ""), (2, "")], **options), expected)
    syncengine.barrier()


@pytest.mark.parametrize("where", ["forward", "middle"])
def test_an_error_in_the_first_step(pool: RankPool, where: str):
    pool.run(first_step_fails, where, gloo=True)


@run_on_ranks(gloo=True)
def test_accumulated_gradients_outlive_an_error_in_forward():
    """As Accelerate's find_executable_batch_size: too large a batch, and once more with a smaller one."""

    def accumulate(model: nn.Module) -> list[torch.Tensor]:
        with model.no_sync():
            model(data(0)).square().mean().backward()
        model.module.where = "forward"
        with pytest.raises(Bad):
            model(data(1))
        model.module.where = ""
        model(data(1)).square().mean().backward()
        return gradients(model.module)

    torch.manual_seed(0)
    ours = accumulate(syncengine.Parallel(Raising()))
    torch.manual_seed(0)
    assert not different_bits(ours, accumulate(DistributedDataParallel(Raising())))


@run_on_ranks()
def test_a_forward_that_is_pending_when_its_step_is_lost_says_so():
    """As contrastive pairs, or two losses: it is no forward that a backward has synchronized."""
    for container in (list, iter):  # outputs that are found, and that are not

        class Pair(Raising):
            def forward(self, x: torch.Tensor) -> Any:
                return container([super().forward(x)])  # noqa: B023

        model = syncengine.Parallel(Pair())
        for where, reason in (("forward", "Bad: the batch is bad: forward"), ("middle", "backward aborted")):
            first = sum(model(data()))
            with pytest.raises(Bad):
                model.module.where = where
                sum(model(data(1))).sum().backward()
            model.module.where = ""
            with pytest.raises(InvalidUsage, match=rf"given up \(.*{reason}\).*[Rr]un the forward again"):
                first.sum().backward()
            loss = sum(model(data(2))).sum()  # the next step is none of this
            loss.backward(retain_graph=True)
            with pytest.raises(InvalidUsage, match="already synchronized"):
                loss.backward()
            assert gradients_are_common(model)
    syncengine.barrier()


@run_on_ranks()
def test_a_forward_that_was_synchronized_before_a_lost_step_says_so():
    model = syncengine.Parallel(Raising())
    loss = model(data()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(Bad):
        model.module.where = "forward"
        model(data(1))
    model.module.where = ""
    with pytest.raises(InvalidUsage, match="already synchronized"):
        loss.backward()


def gradients_are_common(model: nn.Module) -> bool:
    flat = torch.cat([grad.flatten() for grad in gradients(model)])
    everyone = torch.empty(2, flat.numel())
    syncengine.all_gather(everyone, flat)
    return torch.equal(everyone[0], everyone[1])


def one_rank_goes_on(where: str, world: int) -> str:
    torch.manual_seed(0)
    module = Raising()
    model = syncengine.Parallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    assert step(model, optimizer, 0)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(SyncError) as error:
        if syncengine.rank() == 1:
            assert not step(model, optimizer, 1, where)
            step(model, optimizer, 2)
        else:
            step(model, optimizer, 1)
            if where != "late":  # found out in the next step
                pytest.fail("the others' error was not noticed")
            before = [p.detach().clone() for p in module.parameters()]
            step(model, optimizer, 2)
    assert not different_bits([p.detach() for p in module.parameters()], before)
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(SyncError):
        syncengine.barrier()
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", ["forward", "early", "middle", "late"])
def test_an_error_that_one_rank_catches_ends_every_ranks_next_wait(pool: RankPool, where: str, world: int):
    texts = {
        "forward": "raised in forward: Bad: the batch is bad",
        "late": "rank 1: backward of Parallel(Raising) raised",
    }
    for text in pool.run(one_rank_goes_on, where, world, world=world):
        assert "rank 1" in text
        assert texts.get(where, "backward aborted") in text


def catches_and_leaves() -> str:
    model = syncengine.Parallel(Raising())
    model.module.where = "middle" if syncengine.rank() == 1 else ""
    syncengine.barrier()
    with pytest.raises(Bad if syncengine.rank() == 1 else Aborted) as error:
        model(data()).sum().backward()
    return str(error.value)


def test_a_rank_that_leaves_after_an_error_that_it_caught_says_so(pool: RankPool):
    assert "rank 1: backward aborted" in pool.run(catches_and_leaves)[0]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(24, 2), nn.Linear(24, 2)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


def unfinished(forgetful: list[int]) -> tuple[str, int]:
    other = syncengine.Parallel(Mlp())
    model = syncengine.Parallel(Halves())
    forgets = syncengine.rank() in forgetful
    with pytest.raises(SyncError) as error:
        model(data(), both=not forgets).sum().backward()
        model(data())
    for _ in range(2):
        with pytest.raises(SyncError, match="Expected to have finished reduction"):
            model(data())
    other(data()).sum().backward()  # is none of this
    again = syncengine.Parallel(model.module)
    again.zero_grad()
    again(data()).sum().backward()
    expected = [torch.zeros_like(p) for p in model.module.parameters()]
    for rank in range(syncengine.world_size()):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
        found = torch.autograd.grad(model.module(x).sum(), list(model.module.parameters()))
        expected = [a + b / syncengine.world_size() for a, b in zip(expected, found, strict=True)]
    for p, mean in zip(model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean)
    syncengine.barrier()
    return str(error.value), syncengine.rank()


@pytest.mark.parametrize("forgetful", [[0], [1], [0, 1], [0, 2]], ids=str)
def test_an_unfinished_reduction_ends_that_wrapper(pool: RankPool, forgetful: list[int]):
    for text, _ in pool.run(unfinished, forgetful, world=3):
        assert "Expected to have finished reduction" in text
        assert "sometimes.weight" in text


def removed(on: int) -> str:
    model = syncengine.Parallel(nn.Linear(24, 2))
    for _ in range(5):
        model(data()).sum().backward()
    if syncengine.rank() == on:
        model._remove_autograd_hooks()
    with pytest.raises(SyncError, match=r"the hooks of Parallel\(Linear\) were removed") as error:
        model(data()).sum().backward()
    again = syncengine.Parallel(model.module)
    again(data()).sum().backward()
    syncengine.barrier()
    return str(error.value)


def test_removed_hooks_end_that_wrapper(pool: RankPool):
    assert "rank 1: the hooks of" in pool.run(removed, 1)[0]


def raises_around_sync_batch_norm(both: bool) -> str:
    module = nn.Sequential(nn.Linear(24, 8), nn.SyncBatchNorm(8), RaisingBetween())
    model = syncengine.Parallel(module)
    model(data()).sum().backward()
    module[2].raises = syncengine.rank() == 1
    with pytest.raises((Bad, SyncError)):
        model(data()).sum().backward()
    with pytest.raises(SyncError) as error:
        for _ in range(2):
            model(data()).sum().backward()
    return str(error.value)


class RaisingBetween(nn.Module):
    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise Bad("between the layers")
        return x


def test_an_error_between_calls_that_others_wait_in_is_fatal_and_named(pool: RankPool):
    for text in pool.run(raises_around_sync_batch_norm, False):
        assert "rank 1 raised in forward: Bad: between the layers" in text


class ToSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_sparse()


class SparseGradient(nn.Module):
    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (ToSparse.apply(self.weight) if self.sparse else self.weight).T


@run_on_ranks()
def test_a_bad_gradient_costs_a_step():
    """Which the reducer itself finds: it is sparse."""
    module = SparseGradient()
    model = syncengine.Parallel(module)
    module.sparse = True
    with pytest.raises(InvalidUsage, match="Expected variable to have dense gradient: parameter weight"):
        model(data()).sum().backward()
    module.sparse = False
    module.zero_grad()
    x = torch.full((1, 24), 1.0 + syncengine.rank())
    model(x).sum().backward()
    assert module.weight.grad.unique().tolist() == [1.5]
    syncengine.barrier()


class Table(nn.Module):
    """Sparse gradients come last."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.raises = nn.Embedding(9, 24, sparse=True), nn.Linear(24, 2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def act() -> None:
            if self.raises:
                raise Bad("before the sparse gradient")

        return self.head(InBackward.apply(self.table(x), act))


def raises_before_sparse() -> str:
    model = syncengine.Parallel(Table())
    x = torch.arange(5)
    model(x).sum().backward()
    model.module.raises = syncengine.rank() == 0
    with pytest.raises(SyncError) as error:
        for _ in range(2):
            try:
                model(x).sum().backward()
            except Bad:
                model.module.raises = False
    return str(error.value)


def test_an_error_when_only_sparse_gradients_are_missing_is_told(pool: RankPool):
    for text in pool.run(raises_before_sparse):
        assert "rank 0: backward aborted" in text


def unfinished_beside_an_error() -> str:
    model = syncengine.Parallel(Halves())
    model(data()).sum().backward()
    forgets = syncengine.rank() == 0
    with pytest.raises(SyncError, match="Expected to have finished reduction") as error:
        try:
            out = model(data(), both=not forgets)
            if not forgets:
                out = InBackward.apply(out, raise_bad)
            out.sum().backward()
        except Bad:
            pass
        for _ in range(2):
            model(data()).sum().backward()
    syncengine.barrier()
    return str(error.value)


def raise_bad() -> None:
    raise Bad("at once")


def test_an_unfinished_reduction_beside_an_error_is_told(pool: RankPool):
    pool.run(unfinished_beside_an_error)


def weights_in_join() -> None:
    module = Raising()
    model = syncengine.Parallel(module)
    with model.join():
        model.weight(3 + 2 * syncengine.rank())
        module.where = "forward"
        with pytest.raises(Bad):
            model(data())
        module.where = ""
        if syncengine.rank() == 1:
            model(data()).sum().backward()
    syncengine.barrier()


def test_the_weight_of_a_forward_that_raised_is_not_a_shadows(pool: RankPool):
    pool.run(weights_in_join)


@run_on_ranks()
def test_hooks_that_were_removed_concern_no_local_backward():
    model = syncengine.Parallel(nn.Linear(24, 2))
    model(data()).sum().backward()
    model._remove_autograd_hooks()
    model.zero_grad()
    with model.no_sync():
        model(torch.full((1, 24), 1.0 + syncengine.rank())).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [1.0 + syncengine.rank()]


@run_on_ranks()
def test_an_error_in_forward_of_a_model_that_is_wholly_frozen_costs_nothing():
    """No rank waits for its gradients: not even one that has not raised."""
    module = Raising()
    model = syncengine.Parallel(module)
    kept = syncengine.default_communicator()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i, raising in enumerate([(0, 1), (0,), ()]):
        assert step(model, optimizer, i)
        module.requires_grad_(False)
        module.where = "forward" if syncengine.rank() in raising else ""
        with pytest.raises(Bad) if module.where else contextlib.nullcontext():
            model(data(i).requires_grad_()).sum().backward()
        module.requires_grad_(True)
        module.where = ""
        module.zero_grad()
        module(data(i)).sum().backward()  # past the wrapper: averaged, as DDP still waits for one
        for parameter in module.parameters():
            syncengine.all_reduce(mean := parameter.grad.clone(), op="avg")
            assert torch.equal(mean, parameter.grad)
    assert syncengine.default_communicator() is kept
    assert kept.exception() is None
