"""state_dict() of a ShardedOptimizer is the plain optimizer's, and goes back and forth between them."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from sharded_training import (
    batch,
    copies,
    differences,
    different_weights,
    error_of,
    is_unchanged,
    make,
    not_divided,
    plain,
    sharded,
    snapshot,
    train,
    trained,
    unlike_plain,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import syncengine


def save(path: str) -> None:
    net, _, optimizer = trained(3)
    if syncengine.rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path: str) -> list[str]:
    checkpoint = torch.load(path)
    untouched = copy.deepcopy(checkpoint["optimizer"])

    def loaded() -> nn.Module:
        net = make()
        net.load_state_dict(checkpoint["model"])
        return net

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        train(model, optimizer, range(3, 6))
        if isinstance(optimizer, syncengine.ShardedOptimizer):  # a plain one writes to it
            assert differences(untouched, checkpoint["optimizer"]) == []

    return unlike_plain(steps, loaded)


@pytest.mark.thorough
@pytest.mark.parametrize("world", mostly_nightly([1, 2, 4], 1))
def test_a_checkpoint_of_three_ranks_loads_on_any_number(pool: RankPool, world: int, tmp_path: Path):
    pool.run(save, str(tmp_path / "checkpoint.pt"), world=3)
    assert pool.run(load, str(tmp_path / "checkpoint.pt"), world=world) == [[]] * world


@run_on_ranks(world=3)
def test_one_rank_alone_can_save():
    _, model, optimizer = trained(2)
    syncengine.barrier()
    state = snapshot(optimizer) if syncengine.rank() == 1 else None  # nobody else does anything meanwhile
    syncengine.barrier()
    train(model, optimizer, 1)
    reference_model, reference = plain(make())
    train(reference_model, reference, 2)
    return differences(reference.state_dict(), state) if state else []


@run_on_ranks()
def test_what_is_saved_has_its_ordinary_size():
    sizes = []
    for make_one in (sharded, plain):
        net = make()
        model, optimizer = make_one(net)
        train(model, optimizer, 1)
        for item in (net.state_dict(), optimizer.state_dict(), net.head.bias, copy.deepcopy(net.head.weight)):
            file = io.BytesIO()
            torch.save(item, file)
            sizes.append(len(file.getvalue()))
    assert all(abs(a - b) <= 64 * 30 for a, b in zip(sizes[:4], sizes[4:], strict=True)), sizes


@run_on_ranks()
def test_averaged_models_copies_and_numpy():
    ours, theirs = make(), make()
    model, optimizer = sharded(ours)
    reference, plain_optimizer = plain(theirs)
    averaged = [torch.optim.swa_utils.AveragedModel(net) for net in (ours, theirs)]
    train(model, optimizer, 3, after=lambda step: averaged[0].update_parameters(ours))
    train(reference, plain_optimizer, 3, after=lambda step: averaged[1].update_parameters(theirs))
    wrong = different_weights(*averaged)
    twin = copy.deepcopy(ours)
    frozen = copies(twin)
    train(model, optimizer, range(3, 5))
    wrong += [] if is_unchanged(twin, frozen) else ["deepcopy follows"]
    array = ours.head.weight.detach().numpy()
    wrong += [] if (array == ours.head.weight.detach().clone().numpy()).all() else ["numpy"]
    return wrong


@run_on_ranks()
def test_loading_on_one_rank_alone_is_named():
    net, model, optimizer = trained(2)
    before = copies(net)
    if syncengine.rank() == 1:
        optimizer.load_state_dict(snapshot(optimizer))
    text = error_of(lambda: train(model, optimizer, 1))
    assert "Mismatch" in text and "loaded a state dict of the optimizer, or replaced its state: no" in text, text
    assert is_unchanged(net, before)
    if syncengine.rank() == 0:
        optimizer.load_state_dict(snapshot(optimizer))
    train(model, optimizer, 1)
    if syncengine.rank() == 1:
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    text = error_of(lambda: train(model, optimizer, 1))
    assert "Mismatch" in text and "loaded a state dict of the model: no" in text, text


@run_on_ranks()
def test_state_that_dcp_makes():
    """State of zeros; the weights, the rate and the gradients stay, and training is as if nothing had been."""
    again, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(again), plain(theirs)
    before = copies(again)
    for one in (optimizer, plain_optimizer):
        _init_optim_state(one)
    assert not any(value.any() for state in optimizer.state.values() for k, value in state.items() if k != "step")
    assert len(optimizer.state) == len(before)
    assert is_unchanged(again, before)
    assert all(p.grad is None for p in again.parameters())
    wrong = differences(plain_optimizer.state_dict(), optimizer.state_dict())
    train(model, optimizer, 3)
    train(reference, plain_optimizer, 3)
    wrong += differences(plain_optimizer.state_dict(), optimizer.state_dict())
    return wrong + different_weights(again, theirs) + not_divided(again, optimizer)


@pytest.mark.thorough
@run_on_ranks(gloo=True)
def test_whole_state_dicts_of_dcp():
    """`get_state_dict` and `set_state_dict` of model and optimizer together, plain and sharded in turn."""
    options = StateDictOptions(full_state_dict=True)
    results = []
    for kinds in ([plain, plain, plain], [plain, sharded, plain], [sharded, plain, sharded]):
        model, optimizer = kinds[0](make())
        train(model, optimizer, 2)
        for number, kind in enumerate(kinds[1:], 1):
            weights, state = get_state_dict(model.module, optimizer, options=options)
            model, optimizer = kind(make())
            train(model, optimizer, 1)  # something to be overwritten
            set_state_dict(model.module, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
            train(model, optimizer, range(2 * number, 2 * number + 2))
        results.append((model.module, optimizer.state_dict()))
    (whole, reference), *others = results
    wrong = [name for net, _ in others for name in different_weights(net, whole)]
    return wrong + [one for _, state in others for one in differences(reference, state)]


@pytest.mark.parametrize("kind", ["steps are numbers", "of Adam for AdamW"])
@pytest.mark.parametrize("world", [1, 2])
@run_on_ranks()
def test_loading_converts_as_the_class_does(kind: str, world: int):
    """State dicts that the class converts as it loads them."""
    reference_model, reference = plain(make(), torch.optim.Adam, weight_decay=0.1)
    train(reference_model, reference, 3)
    saved = snapshot(reference)
    if kind == "steps are numbers":
        for state in saved["state"].values():
            state["step"] = int(state["step"])

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        given = copy.deepcopy(saved)
        optimizer.load_state_dict(given)
        if isinstance(optimizer, syncengine.ShardedOptimizer):  # a plain one writes to it
            assert differences(given, saved) == []
        train(model, optimizer, 3)

    return unlike_plain(load, weight_decay=0.1)


@run_on_ranks()
def test_states_that_differ_before_sharing_are_named():
    """As of a stale checkpoint on one rank, loaded before the first forward."""
    _, model, optimizer = trained(2)
    saved = snapshot(optimizer)
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"] + syncengine.rank()
    model, optimizer = sharded(make())
    optimizer.load_state_dict(saved)
    text = error_of(lambda: train(model, optimizer, 1))
    assert text.startswith("Mismatch") and "state with CRC-32" in text


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {  # of the entries of each parameter; what is named
    "smaller": (lambda entries: entries["exp_avg"].mul_(0.1), "'exp_avg' of parameter layers.0.weight was written to"),
    "first step": (lambda entries: entries["step"].zero_(), "'step' of parameter layers.0.weight was written to"),
    "data": (
        lambda entries: setattr(entries["exp_avg"], "data", torch.zeros_like(entries["exp_avg"])),
        "'exp_avg' of parameter layers.0.weight lies in other memory",
    ),
    "sent": (
        lambda entries: entries["exp_avg"].share_memory_(),
        "'exp_avg' of parameter layers.0.weight lies in other memory",
    ),
    "replaced on one": (lambda entries: entries.update(exp_avg=entries["exp_avg"].clone()), "or replaced its state"),
    "cleared on one": (lambda entries: entries.clear(), "or replaced its state"),
}


@pytest.mark.parametrize("how", mostly_nightly(EDITS, 0, 2, 5))
@pytest.mark.parametrize("ranks", mostly_nightly([[0, 1], [1]], 1), ids=["all", "one"])
@run_on_ranks()
def test_edits_of_shared_state_are_refused(how: str, ranks: list[int]):
    """Writes to it; and what only one rank puts in the place of entries."""
    edit, says = EDITS[how]
    theirs = make()
    reference, plain_optimizer = plain(theirs)
    train(reference, plain_optimizer, 6)
    ours, model, optimizer = trained(3)
    saved = snapshot(optimizer)
    syncengine.barrier()
    if syncengine.rank() in (ranks if "one" not in how else [1]):
        for entries in optimizer.state.values():
            edit(entries)
    texts = [error_of(lambda: train(model, optimizer, range(3, 4))) for _ in range(2)]
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    assert all(says in text for text in texts), texts
    return different_weights(ours, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@run_on_ranks()
def test_state_that_is_made_but_once_of_a_group_that_is_added_before_any_step():
    nets = [make(), make()]
    (one, *others), all_of_plain = nets[0].parameters(), list(nets[1].parameters())
    model, optimizer = sharded(nets[0], torch.optim.Adagrad, [one], initial_accumulator_value=0.1)
    optimizer.add_param_group({"params": others})
    train(model, optimizer, 2)
    train(*plain(nets[1], torch.optim.Adagrad, all_of_plain, initial_accumulator_value=0.1), 2)
    return different_weights(*nets)


@run_on_ranks()
def test_state_that_is_made_but_once_can_not_be_cleared():
    _, model, optimizer = trained(2, make(), torch.optim.Adagrad)
    saved = snapshot(optimizer)
    optimizer.state.clear()
    for _ in range(2):
        assert "which this optimizer makes but once" in error_of(lambda: train(model, optimizer, 1))
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)
    del saved["state"][0]
    model, optimizer = sharded(make(), torch.optim.Adagrad)
    optimizer.load_state_dict(saved)
    for _ in range(2):
        assert "which this optimizer makes but once" in error_of(lambda: train(model, optimizer, 1))
        assert not different_weights(make(), model.module)


class AppState(Stateful):
    """Of torch's tutorial."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.thorough
@pytest.mark.parametrize("before", mostly_nightly(["at first", "after a backward"], 1))
@run_on_ranks(gloo=True)
def test_a_new_process_resumes(before: str, tmp_path: Path):
    theirs, again = make(), make()
    _, model, optimizer = trained(3)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path)
    reference, plain_optimizer = plain(theirs)
    train(reference, plain_optimizer, 5)
    model, optimizer = sharded(again)
    if before == "after a backward":
        model(batch(0)).square().mean().backward()
        optimizer.zero_grad()
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path)
    train(model, optimizer, range(3, 5))
    wrong = different_weights(again, theirs) + not_divided(again, optimizer)
    return wrong + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@run_on_ranks(gloo=True)
def test_views_on_one_rank_are_no_hindrance():
    """And no checkpoint after all."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        views = get_model_state_dict(model.module) if syncengine.rank() == 1 else None
        get_optimizer_state_dict(model.module, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        del views
        train(model, optimizer, 3)
        return rate

    return unlike_plain(steps)


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
