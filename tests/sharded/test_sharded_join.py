"""Uneven inputs: a rank that has run out of batches still updates its part of the weights."""

import contextlib

import pytest
import torch
from marks import mostly_nightly
from pool import run_on_ranks
from sharded_training import different_weights, error_of, make, not_divided, plain, sharded, train, trained
from torch.distributed.algorithms.join import Join

import syncengine
from syncengine.errors import Aborted, Mismatch


@run_on_ranks()
def test_training_goes_on_after_it():
    net = make()
    model, optimizer = sharded(net)
    with model.join():
        train(model, optimizer, 2 + syncengine.rank())
        grads = [p.grad.clone() for p in net.parameters()]
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, net.parameters(), strict=True))
    train(model, optimizer, 2)


@run_on_ranks(gloo=True)
def test_torchs_join_needs_the_optimizer_too():
    _, model, optimizer = trained(1)
    join = Join([model])
    text = error_of(lambda: train(model, optimizer, 1))
    del join
    assert "Join([model, optimizer])" in text


@pytest.mark.parametrize("caught", [False, True])
@run_on_ranks(world=3, settings={"timeout": 20.0})
def test_a_step_that_all_ranks_refuse_ends_the_context_on_all(caught: bool):
    """Rank 0 has no batch left, and follows. The others go on, or leave the context by the error."""
    rank = syncengine.rank()
    model, optimizer = sharded(make())
    text = ""
    with pytest.raises(Aborted if caught and rank > 0 else Mismatch, match="lr"), model.join():
        if rank > 0:
            train(model, optimizer, 1)
            optimizer.param_groups[0]["lr"] /= rank
            try:
                train(model, optimizer, 1)
            except Mismatch as error:
                text = str(error)
                if not caught:
                    raise
            optimizer.param_groups[0]["lr"] *= rank
            train(model, optimizer, 1)
    assert ("lr" in text) == (rank > 0)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 1)


@pytest.mark.parametrize("caught", [False, True])
@run_on_ranks(world=3, settings={"timeout": 20.0})
def test_ranks_that_disagree_about_a_step_are_told_so(caught: bool):
    """Rank 0 has no batch, and follows. If the others catch the error, their next forward says that rank 0 has left."""
    rank, text = syncengine.rank(), "rank 1 steps a ShardedOptimizer, but rank 2 does not"
    model, optimizer = sharded(make())
    with pytest.raises(Aborted if caught and rank > 0 else Mismatch, match=text), model.join():
        if rank > 0:
            train(model, optimizer, 1)
            with contextlib.suppress(*[Mismatch] if caught else []):
                optimizer.step() if rank == 1 else train(model, optimizer, 1)
            train(model, optimizer, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("torchs", mostly_nightly([False, True], 1), ids=["model.join", "torch's Join"])
@pytest.mark.parametrize("world", mostly_nightly([2, 3], 1))
@run_on_ranks(gloo=True)
def test_parameters_unfrozen_when_a_rank_has_joined(torchs: bool, world: int):
    """On the ranks that still train, after the first one has joined; the others do it after the context."""
    nets, same = [make(), make()], make()
    wrong = []
    for net, kind in zip(nets, [sharded, plain], strict=True):
        net.head.requires_grad_(False)
        model, optimizer = kind(net, weight_decay=0.1)
        together = [model, optimizer] if kind is sharded else [model]
        with Join(together) if torchs else model.join():
            train(model, optimizer, 1)
            if syncengine.rank() > 0:
                train(model, optimizer, range(1, 3))
                net.head.requires_grad_(True)
                train(model, optimizer, range(3, 5))
        net.head.requires_grad_(True)
        if kind is sharded:
            same.load_state_dict(net.state_dict())
            wrong = not_divided(net, optimizer)
            train(model, optimizer, range(9, 11))
    return wrong + different_weights(same, nets[1])
