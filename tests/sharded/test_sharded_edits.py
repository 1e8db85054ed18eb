"""What the user does to `optimizer.state` between steps: as with the plain optimizer, or refused by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool, run_on_ranks
from sharded_training import differences, different_weights, error_of, make, not_divided, plain, sharded, train

import syncengine

Edit = Callable[[torch.optim.Optimizer], None]


def smaller(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.1)


def from_the_first_step(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def by_data(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data = torch.zeros_like(state["exp_avg"])


def share_memory(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].share_memory_()


def new_zeros(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = torch.zeros_like(parameter)


def new_step(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.tensor(1.0)


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def other_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def forget_one(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][3]]


def other_dict(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = {key: value * 0.5 for key, value in state.items()}


def without_effect(optimizer: torch.optim.Optimizer) -> None:
    for parameter in list(optimizer.state):
        optimizer.state[parameter] = optimizer.state.pop(parameter)
        optimizer.state[parameter]["mine"] = "a note"


IN_PLACE = [smaller, from_the_first_step, by_data, share_memory]
REPLACED = [new_zeros, new_step, clear, other_state, forget_one, other_dict]


def beside_plain(edit: Edit, frozen: bool) -> list[str]:
    ours, theirs = make(), make()
    for net in (ours, theirs):
        net.head.requires_grad_(not frozen)
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    for wrapped, one in ((model, optimizer), (reference, plain_optimizer)):
        train(wrapped, one, 3)
        edit(one)
        train(wrapped, one, range(3, 5))
        edit(one)
        train(wrapped, one, range(5, 8))
    wrong = different_weights(ours, theirs)
    if edit is not without_effect:
        wrong += differences(plain_optimizer.state_dict(), optimizer.state_dict())
    syncengine.barrier()
    return wrong + (not_divided(ours, optimizer) if syncengine.world_size() > 1 else [])


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen"])
@pytest.mark.parametrize("edit", [*REPLACED, without_effect])
def test_what_is_replaced_counts(pool: RankPool, edit: Edit, frozen: bool):
    assert pool.run(beside_plain, edit, frozen) == [[]] * 2


@pytest.mark.parametrize("edit", [*REPLACED, *IN_PLACE])
def test_private_state_may_be_changed(pool: RankPool, edit: Edit):
    assert pool.run(beside_plain, edit, False, world=1) == [[]]


def refused(edit: Edit, ranks: list[int]) -> list[Any]:
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    train(model, optimizer, 3)
    train(reference, plain_optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    syncengine.barrier()
    if syncengine.rank() in ranks:
        edit(optimizer)
    texts = [error_of(lambda: train(model, optimizer, range(3, 4))) for _ in range(2)]
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(reference, plain_optimizer, range(3, 6))
    wrong = different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())
    return [texts, wrong]


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("edit", IN_PLACE)
def test_writes_to_shared_state_are_refused(pool: RankPool, edit: Edit, ranks: list[int]):
    key = "step" if edit is from_the_first_step else "exp_avg"
    what = "lies in other memory" if edit in (by_data, share_memory) else "was written to"
    for texts, wrong in pool.run(refused, edit, ranks):
        for text in texts:
            assert f"the state's {key!r} of parameter layers.0.weight {what}" in text
        assert wrong == []


@pytest.mark.parametrize("edit", [new_zeros, clear])
def test_all_ranks_must_replace_the_same(pool: RankPool, edit: Edit):
    for texts, wrong in pool.run(refused, edit, [1]):
        for text in texts:
            assert "Mismatch" in text
            assert "or replaced its state" in text
        assert wrong == []


def remove_a_key(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"]


def number_of_steps(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]]["step"] = 3


def other_shape(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (remove_a_key, "'exp_avg' of parameter layers.0.bias was removed"),
        (number_of_steps, "'step' of parameter layers.0.bias was replaced by a int, but it is a float32 tensor"),
        (other_shape, "'exp_avg' of parameter layers.0.bias was replaced by a float32 tensor of shape (3,)"),
    ],
)
def test_what_will_not_do_is_refused(pool: RankPool, edit: Edit, says: str):
    for texts, wrong in pool.run(refused, edit, [0, 1]):
        for text in texts:
            assert says in text
        assert wrong == []


@run_on_ranks()
def test_state_that_is_made_but_once_can_not_be_cleared():
    net = make()
    model, optimizer = sharded(net, torch.optim.Adagrad)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    text = error_of(lambda: train(model, optimizer, 1))
    optimizer.load_state_dict(saved)
    after = error_of(lambda: train(model, optimizer, 1))
    assert "which this optimizer makes but once" in text
    assert after == ""


@pytest.mark.parametrize("late", ["unfrozen", "all"])
@run_on_ranks()
def test_state_may_be_read_before_there_is_any(late: str):
    """As a log on rank 0: reading puts an empty entry there."""
    ours, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(ours), plain(theirs)
    for net, wrapped, one in ((ours, model, optimizer), (theirs, reference, plain_optimizer)):
        net.layers[0].requires_grad_(late != "unfrozen")
        for step in range(4):
            if step == 2:
                net.layers[0].requires_grad_(True)
            if step or late == "unfrozen":
                train(wrapped, one, range(step, step + 1))
            if syncengine.rank() == 0:
                assert [one.state[p].get("exp_avg") for p in net.parameters()]
    for one in (optimizer, plain_optimizer):
        for parameter in [p for p, entries in one.state.items() if not entries]:
            del one.state[parameter]
    wrong = different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())
    return wrong + not_divided(ours, optimizer)
