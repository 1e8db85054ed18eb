"""An optimizer that is gone but for a cycle, which gc has found on no rank or on one alone, and the one after it."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from pool import run_on_ranks
from sharded_training import batch, different_weights, error_of, make, not_divided, sharded, train, trained, without_gc
from torch import nn

import syncengine
from syncengine.sharded.claims import TornWeights, claim, guard


def collect_on_rank_0() -> None:
    if syncengine.rank() == 0:
        gc.collect()


@pytest.mark.parametrize("how", ["not found", "found on one"])
@run_on_ranks()
def test_a_dropped_optimizer_is_no_hindrance(how: str):
    ours, theirs = make(), make()
    with without_gc():
        model, optimizer = sharded(ours)
        optimizer.itself = [model, optimizer]  # a cycle, as trainers make
        train(model, optimizer, 2)
        theirs.load_state_dict(ours.state_dict())
        del model, optimizer
        if how == "found on one":
            collect_on_rank_0()
        model, optimizer = sharded(ours, torch.optim.SGD)
        train(model, optimizer, 2)
        divided = not_divided(ours, optimizer)
    train(syncengine.Parallel(theirs), torch.optim.SGD(theirs.parameters(), lr=1e-2), 2)
    return divided + different_weights(ours, theirs)


@run_on_ranks()
def test_weights_that_only_some_share_are_named():
    """While the optimizer that shares the others' is there."""
    net, _, optimizer = trained(2)
    if syncengine.rank() == 0:
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    text = error_of(lambda: syncengine.Parallel(net))
    assert text.startswith("Mismatch: Parallel(Mlp) differs between ranks"), text
    assert "layers.0.weight" in text and "shared by a ShardedOptimizer" in text
    optimizer.release()
    syncengine.Parallel(net)(batch(0))


@pytest.mark.parametrize("how", ["all", "one", "failed"])
@run_on_ranks()
def test_an_optimizer_that_was_released_may_be_dropped_later(how: str):
    """Its weights are shared again by another one by then."""
    net, model, first = trained(2)
    if how == "failed":
        error_of(syncengine.barrier)  # the other's steps have ended, too; its abort may come in here
        syncengine.default_communicator().abort("no")
        assert error_of(lambda: train(model, first, 1))
        model = syncengine.Parallel(net)
    else:
        first.release()
    second = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=1e-2)
    train(model, second, 1)
    if how != "one" or syncengine.rank() == 0:
        del first
        gc.collect()
    before = net.head.weight.detach().clone()
    syncengine.barrier()
    if syncengine.rank() == 0:
        net.head.weight.data.mul_(0.5)  # which versions do not see
    syncengine.barrier()
    assert torch.equal(before * 0.5, net.head.weight)
    plain = error_of(torch.optim.SGD(net.parameters(), lr=0.1).step)
    assert plain.startswith("InvalidUsage: SGD.step() would write")
    syncengine.Parallel(net)
    train(model, second, 1)
    return not_divided(net, second)


def test_a_claim_may_outlive_its_parameter():
    parameter = nn.Parameter(torch.ones(3))
    one = claim(parameter, "w", mock.Mock())
    del parameter
    gc.collect()
    one.give_up()
    assert one.by is None


def test_weights_that_a_load_refuses_stay_torn():
    model = nn.Linear(2, 3)
    one = claim(model.weight, "weight", mock.Mock())
    guard(model)
    one.tear("torn")
    for shape in ((2, 4), (2, 3), (6,)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({"weight": torch.zeros(shape), "bias": torch.zeros(3)})
        with pytest.raises(TornWeights, match="torn"):
            model.state_dict()
    model.load_state_dict(nn.Linear(2, 3).state_dict())
    model.state_dict()
    one.give_up()


def leave_behind(binds: bool) -> nn.Module:
    """A module whose optimizer nobody has any more, and rank 0 has collected."""
    net = make("odd")
    optimizer: Any = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.itself = optimizer
    if binds:
        train(syncengine.Parallel(net), optimizer, 1)
        optimizer.zero_grad()
    del optimizer
    collect_on_rank_0()
    return net


@run_on_ranks()
def test_no_rank_binds_or_is_refused_alone():
    with without_gc():
        for binds in (False, True):
            net = leave_behind(binds)
            train(syncengine.Parallel(net), torch.optim.SGD(net.parameters(), lr=0.1), 1)
            optimizer = syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
            model = syncengine.Parallel(nn.Linear(4, 4))
            other: Any = syncengine.Parallel(nn.Linear(4, 4))
            other.itself = [other]
            del other
            collect_on_rank_0()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.release()


@run_on_ranks()
def test_weights_of_one_that_is_gone_may_be_written():
    with without_gc():
        net = leave_behind(binds=True)
        with torch.no_grad():
            net.first.weight.zero_()
        train(syncengine.Parallel(net), torch.optim.SGD(net.parameters(), lr=0.1), 1)


@run_on_ranks()
def test_a_plain_optimizer_may_step_behind_one_that_is_gone():
    with without_gc():
        net = leave_behind(binds=True)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(net.parameters(), lr=0.1).step()


@run_on_ranks()
def test_a_step_binds_no_model_that_is_gone():
    with without_gc():
        net = nn.Linear(4, 4)
        model: Any = syncengine.Parallel(net)
        model.itself = [model]
        del model
        collect_on_rank_0()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        syncengine.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1).step()
        assert not net.weight.is_shared()
