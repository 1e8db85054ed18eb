"""The optimizer itself refuses a step before it has written anything: the next one may be right, as without shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import differences, different_weights, error_of, make, not_divided, plain, sharded, train
from torch import nn

import syncengine

AS_TENSOR = {"lr": torch.tensor(0.25)}  # torch refuses it with foreach


def refused_at(make_one: Any, net: nn.Module, at: int, loads: bool) -> tuple[list[str], torch.optim.Optimizer]:
    """Errors of a step that is refused, twice, when there were `at`, and those of the steps around it."""
    model, optimizer = make_one(net, foreach=True)
    texts = [error_of(lambda: train(model, optimizer, at))]
    if loads:
        weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(at, at + 2))
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.param_groups[0].update(AS_TENSOR)
    texts += [error_of(lambda: train(model, optimizer, range(at, at + 1))) for _ in range(2)]
    texts.append(str(all(map(torch.equal, before, net.parameters()))))
    optimizer.param_groups[0]["lr"] = 0.01
    texts.append(error_of(lambda: train(model, optimizer, range(at, at + 3))))
    return texts, optimizer


@pytest.mark.parametrize(("at", "loads"), [(0, False), (2, False), (2, True)], ids=["first", "later", "loaded"])
@run_on_ranks(world=3)
def test_what_the_optimizer_refuses_tears_nothing(at: int, loads: bool):
    ours, theirs = make(), make()
    found, optimizer = refused_at(sharded, ours, at, loads)
    wanted, reference = refused_at(plain, theirs, at, loads)
    wrong = different_weights(ours, theirs) + differences(reference.state_dict(), optimizer.state_dict())
    wrong = wrong + not_divided(ours, optimizer)
    assert found == wanted
    assert found[1].startswith("RuntimeError: lr as a Tensor") or found[1].startswith("ValueError: lr as a Tensor")
    assert (found[0], found[3], found[4], wrong) == ("", "True", "", [])


def refuses_on_one() -> list[str]:
    """The ranks agree on numbers, of which one has another kind."""
    net = make()
    model, optimizer = sharded(net, foreach=True)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25) if syncengine.rank() == 1 else 0.25
    return [error_of(lambda: train(model, optimizer, 1)), error_of(net.state_dict)]


def test_what_one_rank_refuses_and_others_have_done_is_torn(pool: RankPool):
    answers = pool.run(refuses_on_one, world=3)
    for texts in answers:
        assert all("TornWeights: the weights are torn at step 3" in text and "rank 1" in text for text in texts), texts
    assert any("rank 1 raised" in step and "lr as a Tensor" in step for step, _ in answers)  # the first that knew


def refuses_without_work() -> list[str]:
    """What one slice has room for leaves nothing to the others."""
    net = nn.Linear(24, 1, bias=False)
    net.weight.data.fill_(0.5)
    model, optimizer = sharded(net, foreach=True)
    train(model, optimizer, 1)
    optimizer.param_groups[0].update(AS_TENSOR)
    texts = [error_of(lambda: train(model, optimizer, 1))]
    optimizer.param_groups[0]["lr"] = 0.01
    return [*texts, error_of(lambda: train(model, optimizer, 1))]


def test_ranks_that_have_nothing_to_do_raise_too(pool: RankPool):
    answers = pool.run(refuses_without_work, world=3)
    assert [after for _, after in answers] == [""] * 3
    assert all("lr as a Tensor" in text for text, _ in answers), answers
    assert sorted(text.partition(":")[0] for text, _ in answers)[:2] == ["Aborted", "Aborted"]


class Halves(nn.Module):
    """All ranks have a part of the second; the first rank has the first, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def train_with_type_errors(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    try:
        train(model, optimizer, 1)
    except TypeError as error:
        raise ValueError(str(error)) from error


@pytest.mark.parametrize("kind", ["single", "fused"])
@run_on_ranks()
def test_an_error_half_way_is_torn(kind: str):
    """Fused kernels write without a version: there any error is.

    An error in the second group, when the first one has been updated.
    """
    net = Halves()
    model = syncengine.Parallel(net)
    first = {"params": net.first.parameters(), **({"fused": True} if kind == "fused" else {})}
    groups = [first, {"params": net.second.parameters()}]
    optimizer = syncengine.ShardedOptimizer(groups, torch.optim.SGD, lr=0.01)
    train(model, optimizer, 2)
    optimizer.param_groups[1]["lr"] = "much"
    texts = [error_of(lambda: train_with_type_errors(model, optimizer)), error_of(net.state_dict)]
    assert all("TornWeights: the weights are torn at step 3" in text for text in texts), texts
