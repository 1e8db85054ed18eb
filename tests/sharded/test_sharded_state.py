"""state_dict() of a ShardedOptimizer is the plain optimizer's, and goes back and forth between them."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import RankPool, run_on_ranks
from sharded_training import (
    OPTIMIZERS,
    differences,
    different_weights,
    error_of,
    make,
    not_divided,
    plain,
    sharded,
    snapshot,
    train,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import syncengine


def one_continues(kind: type, options: dict, first_sharded: bool, name: str) -> list[str]:
    """Four steps one way and four the other, beside eight of plain torch, which also loads what it has saved."""
    whole, half = make(name), make(name)
    reference, optimizer = plain(whole, kind, **options)
    train(reference, optimizer, 4)
    optimizer.load_state_dict(snapshot(optimizer))  # some 0-dimensional ones change their dtype
    loaded = snapshot(optimizer)
    train(reference, optimizer, range(4, 8))
    one, other = (sharded, plain) if first_sharded else (plain, sharded)
    model, before = one(half, kind, **options)
    train(model, before, 4)
    saved = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": before.state_dict()}, saved)
    checkpoint = torch.load(io.BytesIO(saved.getvalue()))
    untouched = copy.deepcopy(checkpoint)
    second = make(name)
    model, after = other(second, kind, **options)
    train(model, after, 2)  # something to be overwritten
    model.module.load_state_dict(checkpoint["model"])
    after.load_state_dict(copy.deepcopy(checkpoint["optimizer"]) if first_sharded else checkpoint["optimizer"])
    wrong = differences(after.state_dict(), loaded)
    train(model, after, range(4, 8))
    wrong += [f"argument: {one}" for one in differences(untouched["optimizer"], checkpoint["optimizer"])]
    return wrong + different_weights(whole, second) + differences(optimizer.state_dict(), after.state_dict())


@pytest.mark.parametrize("first_sharded", [True, False], ids=["to plain", "from plain"])
@pytest.mark.parametrize("model", ["odd", "mixed"])
@run_on_ranks(world=3)
def test_a_checkpoint_continues_with_the_same_bits(first_sharded: bool, model: str):
    wrong = []
    for name, options in OPTIMIZERS.items():
        wrong += [f"{name}: {one}" for one in one_continues(getattr(torch.optim, name), options, first_sharded, model)]
    return wrong


def save(path: str) -> None:
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 3)
    if syncengine.rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path: str) -> list[str]:
    checkpoint = torch.load(path)
    untouched = copy.deepcopy(checkpoint["optimizer"])
    found = []
    nets = []
    for make_optimizer in (sharded, plain):
        net = make()
        net.load_state_dict(checkpoint["model"])
        model, optimizer = make_optimizer(net)
        optimizer.load_state_dict(checkpoint["optimizer"])
        train(model, optimizer, range(3, 6))
        nets.append((net, optimizer))
        if make_optimizer is sharded:
            found = [f"argument: {one}" for one in differences(untouched, checkpoint["optimizer"])]
    (ours, optimizer), (theirs, reference) = nets
    return found + different_weights(ours, theirs) + differences(reference.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_checkpoint_of_three_ranks_loads_on_any_number(pool: RankPool, world: int, tmp_path: Path):
    pool.run(save, str(tmp_path / "checkpoint.pt"), world=3)
    assert pool.run(load, str(tmp_path / "checkpoint.pt"), world=world) == [[]] * world


@run_on_ranks(world=3)
def test_one_rank_alone_can_save():
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    syncengine.barrier()
    found = []
    if syncengine.rank() == 1:  # nobody else does anything meanwhile
        found.append(snapshot(optimizer))
    syncengine.barrier()
    train(model, optimizer, 1)
    reference_model, reference = plain(make())
    train(reference_model, reference, 2)
    return [wrong for state in found for wrong in differences(reference.state_dict(), state)]


def sizes_of_saved(is_sharded: bool) -> list[int]:
    net = make()
    model, optimizer = sharded(net) if is_sharded else plain(net)
    train(model, optimizer, 1)
    sizes = []
    for item in (net.state_dict(), optimizer.state_dict(), net.head.bias, copy.deepcopy(net.head.weight)):
        file = io.BytesIO()
        torch.save(item, file)
        sizes.append(len(file.getvalue()))
    return sizes


def test_what_is_saved_has_its_ordinary_size(pool: RankPool):
    ours, theirs = pool.run(sizes_of_saved, True), pool.run(sizes_of_saved, False)
    assert all(abs(a - b) <= 64 * 30 for a, b in zip(ours[0], theirs[0], strict=True)), (ours, theirs)


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
    frozen = [p.detach().clone() for p in twin.parameters()]
    train(model, optimizer, range(3, 5))
    wrong += ["deepcopy follows" for a, b in zip(frozen, twin.parameters(), strict=True) if not torch.equal(a, b)]
    array = ours.head.weight.detach().numpy()
    wrong += [] if (array == ours.head.weight.detach().clone().numpy()).all() else ["numpy"]
    return wrong


@run_on_ranks()
def test_loading_on_one_rank_alone_is_named():
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    before = [p.detach().clone() for p in net.parameters()]
    if syncengine.rank() == 1:
        optimizer.load_state_dict(snapshot(optimizer))
    texts = [error_of(lambda: train(model, optimizer, 1))]
    kept = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    if syncengine.rank() == 0:
        optimizer.load_state_dict(snapshot(optimizer))
    texts.append(error_of(lambda: train(model, optimizer, 1)))
    if syncengine.rank() == 1:
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    texts.append(error_of(lambda: train(model, optimizer, 1)))
    first, both, last = texts
    assert "Mismatch" in first and "loaded a state dict of the optimizer, or replaced its state: no" in first, first
    assert both == "", both
    assert "Mismatch" in last and "loaded a state dict of the model: no" in last, last
    assert kept


def through_dcp(folder: str) -> list[str]:
    ours, theirs = make(), make()
    model, optimizer = sharded(ours)
    train(model, optimizer, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(ours, optimizer)}, checkpoint_id=folder)
    reference, plain_optimizer = plain(theirs)
    train(reference, plain_optimizer, 5)
    again = make()
    again.load_state_dict(ours.state_dict())
    model, optimizer = sharded(again)
    state = {"optimizer": get_optimizer_state_dict(again, optimizer)}  # its _init_optim_state steps with zeros
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(again, optimizer, state["optimizer"])
    train(model, optimizer, range(3, 5))
    return different_weights(again, theirs) + differences(plain_optimizer.state_dict(), optimizer.state_dict())


@run_on_ranks()
def test_state_that_dcp_makes():
    """State of zeros; the weights, the rate and the gradients stay, and training is as if nothing had been."""
    again, theirs = make(), make()
    (model, optimizer), (reference, plain_optimizer) = sharded(again), plain(theirs)
    before = [p.detach().clone() for p in again.parameters()]
    wrong = []
    for one in (optimizer, plain_optimizer):
        _init_optim_state(one)
    wrong += [f"{key} of {p.shape}" for p, s in optimizer.state.items() for key in s if key != "step" and s[key].any()]
    wrong += ["no state"] if len(optimizer.state) != len(before) else []
    wrong += ["weights"] if not all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True)) else []
    wrong += ["gradients"] if any(p.grad is not None for p in again.parameters()) else []
    wrong += differences(plain_optimizer.state_dict(), optimizer.state_dict())
    train(model, optimizer, 3)
    train(reference, plain_optimizer, 3)
    wrong += differences(plain_optimizer.state_dict(), optimizer.state_dict())
    return wrong + different_weights(again, theirs) + not_divided(again, optimizer)


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


def test_distributed_checkpoints(pool: RankPool):
    with tempfile.TemporaryDirectory() as folder:
        assert pool.run(through_dcp, folder, gloo=True) == [[]] * 2


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
    kept = copy.deepcopy(saved)
    ours, theirs = make(), make()
    (model, optimizer), (other, plain_optimizer) = sharded(ours, weight_decay=0.1), plain(theirs, weight_decay=0.1)
    for wrapped, one in ((model, optimizer), (other, plain_optimizer)):
        one.load_state_dict(saved if one is optimizer else copy.deepcopy(saved))  # the plain one writes to it
        train(wrapped, one, 3)
    changed = [] if saved["param_groups"] == kept["param_groups"] else ["the argument"]
    return (
        changed
        + differences(saved, kept)
        + different_weights(ours, theirs)
        + differences(plain_optimizer.state_dict(), optimizer.state_dict())
    )


@run_on_ranks()
def test_states_that_differ_before_sharing_are_named():
    """As of a stale checkpoint on one rank, loaded before the first forward."""
    net = make()
    model, optimizer = sharded(net)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"] + syncengine.rank()
    again = make()
    model, optimizer = sharded(again)
    optimizer.load_state_dict(saved)
    text = error_of(lambda: train(model, optimizer, 1))
    assert text.startswith("Mismatch") and "state with CRC-32" in text
