"""torch.distributed.checkpoint makes an optimizer's state by a step of zeros, while it holds views of the weights."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import RankPool, run_on_ranks
from sharded_training import batch, differences, different_weights, error_of, make, not_divided, plain, sharded, train
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import syncengine


class AppState(Stateful):
    """Of torch's tutorial."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def resume(folder: str, before: str) -> list[str]:
    ours, theirs, again = make(), make(), make()
    model, optimizer = sharded(ours)
    train(model, optimizer, 3)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    reference, plain_optimizer = plain(theirs)
    train(reference, plain_optimizer, 5)
    model, optimizer = sharded(again)
    if before == "after a backward":
        model(batch(0)).square().mean().backward()
        optimizer.zero_grad()
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    train(model, optimizer, range(3, 5))
    wrong = different_weights(again, theirs) + not_divided(again, optimizer)
    return wrong + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("before", ["at first", "after a backward"])
def test_a_new_process_resumes(pool: RankPool, before: str):
    with tempfile.TemporaryDirectory() as folder:
        assert pool.run(resume, folder, before, gloo=True) == [[]] * 2


@run_on_ranks(gloo=True)
def test_views_on_one_rank_are_no_hindrance():
    """And no checkpoint after all."""
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    views = get_model_state_dict(ours) if syncengine.rank() == 1 else None
    for net, one in ((ours, optimizer), (theirs, plain_optimizer)):
        get_optimizer_state_dict(net, one)
    rates = [one.param_groups[0]["lr"] for one in (optimizer, plain_optimizer)]
    del views
    train(model, optimizer, 3)
    train(reference, plain_optimizer, 3)
    wrong = different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())
    return wrong + not_divided(ours, optimizer) + [f"rates {rates}"] * (rates[0] != rates[1])


@run_on_ranks()
def test_a_step_with_gradients_shares():
    """Of one rank, in the first step: not what makes state."""
    net = make()
    _model, optimizer = sharded(net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if syncengine.rank() == 1:
        net.head.bias.grad.fill_(1)
    views = net.state_dict()
    assert "is also held by" in error_of(optimizer.step)
    del views
