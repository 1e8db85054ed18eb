"""Wrappers that come and go, also on one rank alone: which buckets belong together is agreed among the ranks."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from parallel_models import CAP, gradients
from pool import run_on_ranks
from torch import nn

import syncengine

pytestmark = pytest.mark.usefixtures("kinds_of_buckets")

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "without init_sync": lambda model: syncengine.Parallel(copy.deepcopy(model.module), init_sync=False),
}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(module: nn.Module, salt: int, rank: int) -> torch.Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * salt + rank))
    return module(batch.to(next(module.parameters()).dtype)).square().sum()


def assert_mean(model: nn.Module, salt: int) -> None:
    """The gradients are the mean of those that all ranks' data give on one."""
    alone = copy.deepcopy(model.module).double()
    alone.zero_grad()
    ranks = range(model.communicator.size)
    (sum(loss_of(alone, salt, rank) for rank in ranks) / len(ranks)).backward()
    torch.testing.assert_close([p.grad.double() for p in model.parameters()], gradients(alone), rtol=1e-5, atol=1e-6)


def check_steps(*models: nn.Module, salts: Iterable[int] = (0,)) -> None:
    for salt in salts:
        for model in models:
            model.zero_grad()
            loss_of(model, salt, model.communicator.rank).backward()
            assert_mean(model, salt)


def make(trained: bool, **options: Any) -> syncengine.Parallel:
    torch.manual_seed(1)
    model = syncengine.Parallel(small(), **options)
    if trained:
        check_steps(model)
    return model


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("how", COPIES)
@run_on_ranks(world=3)
def test_copies_on_one_rank_alone_disturb_nobody(how: str, trained_before: bool):
    model = make(trained_before)
    kept = [COPIES[how](model) for _ in range(3)] if syncengine.rank() == 1 else []
    after = syncengine.Parallel(small())
    check_steps(after, model, salts=range(3))
    later = COPIES[how](after)  # on all ranks
    check_steps(later, after, salts=range(3))
    del kept  # until here


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("how", COPIES)
@run_on_ranks()
def test_a_copy_has_buckets_of_its_own(how: str, trained_before: bool):
    """Backwards of the original and of its copies, all begun before one has ended on all ranks."""
    model = make(trained_before)
    models = [model, COPIES[how](model), COPIES[how](model)]
    with torch.no_grad():
        for i, each in enumerate(models):
            for parameter in each.parameters():
                parameter.add_(0.1 * i)
    for round in range(4):
        for i in torch.randperm(3, generator=torch.Generator().manual_seed(round)).tolist():
            check_steps(models[i], salts=[10 * round + i])
        losses = [loss_of(each, i, syncengine.rank()) for i, each in enumerate(models)]
        for each in models:
            each.zero_grad()
        sum(losses).backward()  # hooks of all three, as autograd has them
        for i, each in enumerate(models):
            assert_mean(each, i)


@run_on_ranks()
def test_copies_of_two_models_are_not_mixed_up():
    models = [syncengine.Parallel(small()), syncengine.Parallel(small())]
    copies = [copy.deepcopy(model) for model in models]
    with pytest.raises(syncengine.errors.Mismatch) as error:
        check_steps(*copies[:: 1 if syncengine.rank() == 0 else -1])  # so that nobody waits crosswise
    assert str(error.value).count("a copy of the one with number") == 1, error.value


@pytest.mark.parametrize("trained_before", [False, True])
@run_on_ranks(world=3)
def test_the_first_plan_of_a_copy_inside_join(trained_before: bool):
    model = make(trained_before)
    extra = copy.deepcopy(model) if syncengine.rank() == 0 else None
    other = copy.deepcopy(model)
    for each in (other, model):
        with each.join():
            for batch in range(2 * syncengine.rank()):  # rank 0 has none
                each.zero_grad()
                each(torch.full((2, 4), float(batch))).sum().backward()
    for parameter in other.parameters():
        syncengine.broadcast(everyones := parameter.detach().clone(), 0)
        assert torch.equal(parameter, everyones)
    check_steps(other, model)
    assert (extra is None) == (syncengine.rank() != 0)


@run_on_ranks(world=4)
def test_communicators_of_splits_agree_by_themselves():
    split = syncengine.default_communicator().split([0, 2] if syncengine.rank() % 2 == 0 else [1, 3])
    with pytest.raises(syncengine.errors.InvalidUsage, match="default communicator"):
        pickle.dumps(syncengine.Parallel(small(), process_group=split))
    for round in range(4):
        model = syncengine.Parallel(small(), process_group=split)
        spare = copy.deepcopy(syncengine.Parallel(small())) if round == 1 else None
        if spare is not None:
            check_steps(spare, salts=[round])
        kept = model if syncengine.rank() == 3 else None
        check_steps(model, salts=[round])
    del kept  # until here


@pytest.mark.parametrize("keeps", [False, True])
@run_on_ranks()
def test_dropped_on_one_rank_alone(keeps: bool):
    """A wrapper that one rank has dropped in the middle of a backward of the others'."""
    model = make(True, **CAP)
    loss = model(torch.full((1, 4), 1.0)).sum()
    loss.backward()
    if syncengine.rank() == 1 and not keeps:
        del model, loss
        gc.collect()
    other = syncengine.Parallel(small())
    check_steps(other, *([model] if keeps else []), salts=range(3))
